"""Values of Python in the meta of a checkpoint, which is JSON."""
