"""Tests of recovery on real jobs: starts runs, harms them at random moments, and checks that they go on. See docs/faults.md.

The command is `python -m mpitrain chaos`. job.py starts a job and finds its ranks, trial.py harms them and judges one run, cases.py has
the rows of the table, and checkout.py finds the scripts that start jobs.
"""
