"""The transports, which move elements between ranks: over MPI, through node memory, or from device to device."""
