"""Files of others, a module for each format: `write(path, sources, ...)` makes one from `Source`s, a piece at a time.

What is read back is here too: `safetensors.py` and `torch_file.py` have `sources`. No module knows checkpoints, names or overwriting.
"""
