"""What only CUDA has: captured steps, and linear layers in fp8."""
