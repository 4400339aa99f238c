"""The storage of checkpoints: local and remote folders, access to their files, and the list of a folder's checkpoints."""
