"""Where checkpoints lie: local and remote folders, access to their files, and which checkpoints a folder holds."""
