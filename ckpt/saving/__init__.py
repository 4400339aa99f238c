"""What saves checkpoints: agreement between the ranks, who writes what, the drivers, the background, further copies."""
