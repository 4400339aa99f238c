"""What a checkpoint is: boxes of tensors, the manifest and its validation, HDF5."""
