"""The format of a checkpoint: boxes of tensors, the manifest and its validation, HDF5."""
