"""The targets, one a file, whose name is the target's. Each file has `TARGET`, an object of a subclass of `fuzzing.target.Target`."""
