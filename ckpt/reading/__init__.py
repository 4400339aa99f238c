"""What reads checkpoints: entries of one by their index, and arrays of all ranks."""
