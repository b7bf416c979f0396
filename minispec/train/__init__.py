"""Training draft heads, `python -m minispec.train`. Begin with `rounds.py`."""
