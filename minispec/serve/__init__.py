"""What serves an LLM over HTTP: the thread that owns it, requests in, answers out."""
