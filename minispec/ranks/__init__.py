"""One model in several processes: what they do together, and each one's share of it."""
