"""Files of others, a module for each format: `write(path, sources, ...)` makes one from `Source`s, a piece at a time.

`safetensors.py` and `torch_file.py` read, too. No module knows checkpoints or overwriting. A new format is a module here, its suffixes
and writer in ../exporting.py, and its reader in ../importing.py.
"""
