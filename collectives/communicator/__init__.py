"""The Communicator and its parts, meshes of communicators, and `world()`."""
