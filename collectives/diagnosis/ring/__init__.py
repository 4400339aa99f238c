"""The ring of sockets through which a rank learns of the end of its neighbours: goodbye.py, over links.py, between a roster's ranks."""
