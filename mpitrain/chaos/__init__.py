"""Tests of recovery on real jobs: starts runs, harms them at random moments, and checks that they go on. See docs/faults.md.

The command is `python -m mpitrain chaos`. job.py starts a job and finds its ranks, faults.py harms them, trial.py judges one run, and
cases.py has the rows of the table.
"""
