"""Compares predicted with measured steps of many layouts: `mpirun -np N python -m mpitrain plan --compare MACHINE`.

cases.py: the layouts. steps.py: makes and times them. results.py: the figures of a launch. compare_report.py: how good the predictions
are. compare_command.py: the command.
"""
