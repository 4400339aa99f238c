"""Reads the record of a run again, without torch and MPI."""
