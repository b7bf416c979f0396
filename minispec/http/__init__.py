"""What is sent over HTTP. Begin with `parse.py`."""
