"""Commands and pages that show a run: they read its folder, and need neither torch nor MPI."""
