"""Checks: every byte of a checkpoint, its HDF5 files, and the differences of two checkpoints."""
