"""Several engines in processes of their own behind one server; Ray."""
