"""Programs beside the main job: the planner, doctor, profile and benchmarks."""
