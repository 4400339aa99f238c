"""The batches of a run: the part of each rank, and the sequences of one forward."""
