"""Who is in which operation, who is missing, and errors that concern more than one rank.

together.py: an error of one rank becomes one of all. uncaught.py: a rank that ends by an error ends the job; child.py: a forked child
does not. checked.py: ranks compare their calls. record.py: the last operations of each rank; dump.py: the same in words. monitor.py: a
thread that asks the other ranks and answers them (post.py), also while its rank is stuck, at the deadline (deadline.py), after the end
of a rank, and at SIGUSR2 (bell.py); report.py makes sense of the answers. stacks.py: where a thread stands.
"""

from collectives.diagnosis.checked import compare_calls
from collectives.diagnosis.deadline import set_deadline
from collectives.diagnosis.dump import set_record_folder
from collectives.diagnosis.together import on_all_ranks, together
from collectives.diagnosis.uncaught import abort_on_uncaught, is_leaving_together, leave_together

__all__ = [
    "abort_on_uncaught",
    "compare_calls",
    "is_leaving_together",
    "leave_together",
    "on_all_ranks",
    "set_deadline",
    "set_record_folder",
    "together",
]
