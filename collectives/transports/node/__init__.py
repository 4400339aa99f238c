"""Through the memory of a node."""
