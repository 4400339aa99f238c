"""What makes a save atomic, and clears up what others left."""
