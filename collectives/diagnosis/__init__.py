"""Shows the operation of each rank and the missing ranks, and raises errors that concern more than one rank.

together.py raises an error of one rank on all ranks. uncaught.py ends the job if a rank ends by an error. ring/ has the sockets through
which a rank learns of the end of its neighbours. meeting.py compares the versions of the ranks when they start. job.py knows the ranks
of the job, and loss.py a loss of ranks in a job that goes on. finalize.py ends MPI at Python's exit. checked.py compares the ranks'
calls; recorder.py records a communicator's calls. record.py keeps the last operations of each rank; dump.py prints them; failure.py
writes the report of a failure to a file. threads.py refuses two threads in one communicator. monitor.py is a thread that asks the other
ranks (inquiry.py) and answers them (answer.py, channel.py), even while its rank is stuck: when a wait lasts (notice.py), at the
deadline (deadline.py, also if JAX is stuck), after the end of a rank, and at SIGUSR2 (bell.py). conclusions.py acts on the answers.
losses.py detects lost ranks. node/ looks at a rank of the node that gives no answer; hang_report.py makes reports of the answers,
long_wait.py notices, and deadlock.py the reports of checked mode. stacks.py finds the place of a thread. ending.py ends NCCL before
MPI.
"""

from collectives.diagnosis.checked import compare_calls
from collectives.diagnosis.dump import set_record_folder
from collectives.diagnosis.failure import set_failure_file, write_failure
from collectives.diagnosis.hangs.deadline import set_deadline
from collectives.diagnosis.together import on_all_ranks, together
from collectives.diagnosis.uncaught import abort_on_uncaught, ends_well, leave_together, show_all_ranks

__all__ = [
    "abort_on_uncaught",
    "compare_calls",
    "ends_well",
    "leave_together",
    "on_all_ranks",
    "set_deadline",
    "set_failure_file",
    "set_record_folder",
    "show_all_ranks",
    "together",
    "write_failure",
]
