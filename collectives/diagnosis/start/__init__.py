"""How a job begins: initialize.py starts MPI, and then the ranks compare their versions in a meeting (meeting.py)."""
