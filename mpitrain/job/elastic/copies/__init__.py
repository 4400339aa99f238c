"""Copies of a run's state in node memory, from which the ranks that survive a loss go on.

files.py is the format of a copy, folders.py the place. taking.py writes the copies of a rank, partners.py sends them to another node,
over the connections of transfers.py, and restoring.py finds and reads them, on any number of ranks. orphans.py finds the copies of dead
runs, and holding.py keeps those of living ones from it. remote.py has the commands that remove those of a run on another host.
"""
