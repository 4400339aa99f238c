"""`python -m mpitrain doctor`: checks the installation and the cluster, and says what to do about what is wrong.

A check is a function that measures facts, and a function that judges them. doctor_command.py reads the words and prints the report. It
stays outside MPI. watch.py starts worker.py in a process of its own, which carries out the checks of checks.py. So a crash or a hang of
MPI itself ends in a report. beforehand.py compares the sources of the ranks before MPI starts.
host.py, ranks.py, job.py, network.py and packages.py (libraries in a process of their own) measure. Each has a module of judges/.
findings.py is what they say, and its form on the screen.
"""
