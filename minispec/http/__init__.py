"""What is sent over HTTP. Begin with `schema.py`."""
