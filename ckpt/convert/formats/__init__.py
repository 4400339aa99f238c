"""Files of other programs, one module per format: `write(path, sources, ...)` makes a file from `Source`s, one piece at a time.

`safetensors.py` and `torch_file.py` also read. The modules do not handle checkpoints or overwriting. A new format needs a module here,
its suffixes and its writer in ../exporting.py, and its reader in ../importing.py.
"""
