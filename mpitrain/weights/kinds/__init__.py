"""What a checkpoint keeps, one kind of state in a file: what of it is saved, and what is loaded."""
