"""The main job: a training run from its settings to its last checkpoint."""
