"""Comparisons that need a checkout, and are not in the wheel: `python -m benchmarks NAME`.

chaos/: harm to real jobs. recovery/: the next step after a kill, beside torchrun. data/: the reading of documents, beside other
libraries. monitoring/: sinks, report and watch, beside other libraries. published/: the planner beside tables of papers.
`python -m mpitrain chaos`, `bench recovery`, `bench data`, `bench monitoring` and `plan --published` are the same commands.
"""
