"""The codec of links: float32 elements as fewer bytes, and back. This package does not communicate.

`formats` has the formats and their sizes, and is light to import. `coding` encodes and decodes.
"""
