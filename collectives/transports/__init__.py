"""How elements get from rank to rank: over MPI, or through the memory of the node."""
