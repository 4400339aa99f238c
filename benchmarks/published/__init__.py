"""The comparison with published runs. tables.py: the tables of papers. published_report.py: the comparison as tables and as a plot."""
