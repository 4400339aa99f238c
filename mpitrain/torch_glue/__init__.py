"""torch, worked around: each file says which behaviour of torch it meets."""
