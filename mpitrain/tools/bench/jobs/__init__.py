"""Jobs that a benchmark starts. checkout.py: the scripts of the checkout that start them. job.py: one job, its output and its files."""
