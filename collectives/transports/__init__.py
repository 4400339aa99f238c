"""How elements get from rank to rank: over MPI, through the memory of the node, or from device to device."""
