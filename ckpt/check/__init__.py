"""Checks of all bytes of a checkpoint and of its HDF5 files, statistics, and differences of two checkpoints."""
