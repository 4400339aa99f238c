"""Simulates a training run event by event: jitter, slow ranks, failures and checkpoints, at thousands of ranks within seconds.

job.py: what is simulated. steps.py: the times of steps, of all copies of a pipeline at once. run.py: a long run, in which steps are
lost. interval.py: the best time between two checkpoints. outcome.py: `simulate`, and what it returns. picture.py: draws it.
simulate_command.py: flags and a table.
"""

from mpitrain.tools.plan.simulation.job import Job
from mpitrain.tools.plan.simulation.outcome import Outcome, simulate
from mpitrain.tools.plan.simulation.picture import draw

__all__ = ["Job", "Outcome", "draw", "simulate"]
