"""The checkpoints of the main job: what they hold of a run, and how a run goes on from them."""
