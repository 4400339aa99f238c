"""Tests of recovery on real jobs: starts runs, harms them at random moments, and checks that they go on. See docs/faults.md.

The command is `python -m mpitrain chaos`. trial.py harms the ranks of a job and judges one run, and cases.py has the rows of the
table. mpitrain/tools/bench/jobs/ starts a job and finds its ranks.
"""
