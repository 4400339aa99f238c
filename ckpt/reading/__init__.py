"""Reading: parts of tensors by an index, and loading on all ranks."""
