"""Shows the operation of each rank and the missing ranks, and raises errors that concern more than one rank.

together.py: an error of one rank becomes one of all. uncaught.py: a rank that ends by an error ends the job; goodbye.py: a rank that
dies is noticed; finalize.py: MPI ends with Python, and only in ranks. checked.py: ranks compare their calls; recorder.py: how a
communicator records each call. record.py: the last operations of each rank; dump.py: the same in words; threads.py: two threads in one
communicator. monitor.py: a thread that asks the other ranks (inquiry.py) and answers them (channel.py), also while its rank is stuck:
when a wait lasts (notice.py), at the deadline (deadline.py; standstill.py where JAX is what is stuck), after the end of a rank, and
at SIGUSR2 (bell.py); report.py turns the answers into reports. stacks.py: where a thread is. ending.py: NCCL ends before MPI.
"""

from collectives.diagnosis.checked import compare_calls
from collectives.diagnosis.dump import set_record_folder
from collectives.diagnosis.hangs.deadline import set_deadline
from collectives.diagnosis.together import on_all_ranks, together
from collectives.diagnosis.uncaught import abort_on_uncaught, ends_well, leave_together

__all__ = [
    "abort_on_uncaught",
    "compare_calls",
    "ends_well",
    "leave_together",
    "on_all_ranks",
    "set_deadline",
    "set_record_folder",
    "together",
]
