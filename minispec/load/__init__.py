"""What is read before the first step: model folders, published heads, the machine. Begin with `weights.py`."""
