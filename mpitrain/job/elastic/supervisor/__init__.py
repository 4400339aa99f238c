"""`python -m mpitrain elastic`: starts a job, and starts it again on the hosts that answer until the run has come to its end.

The modules need Python's standard library alone, so that a head node without torch, NumPy and mpi4py can run them. `words.py`,
`hosts.py`, `launch/limits.py` and `decisions.py` are pure; `agents.py` reaches hosts, `live_hosts.py` knows which of them answer,
`folder.py` is the run's folder; `plan.py` is what a supervisor is asked to do, `launch/` one launch, `supervisor.py` the sequence of
launches; `scripts.py` answers the scripts of mpirun/; `texts.py` prints by a pure file of the package collectives.
"""
