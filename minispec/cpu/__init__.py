"""What makes a CPU fast: gathered attention, linear layers, direct calls of compiled code, huge pages."""
