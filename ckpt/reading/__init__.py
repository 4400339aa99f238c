"""Reading: parts of tensors by an index, and arrays of all ranks."""
