"""The information about this process's launcher that is available before MPI starts."""

import math
import os
import re
import shlex
import stat
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from collectives.processes import age_s, stat_fields
from collectives.secret_forms import HIDDEN
from collectives.texts import without_secrets


class _Launcher(NamedTuple):
    """A launcher in words, and the variables that it sets for its ranks.

    `rank`, `size`: this process's rank, and their number; `jobs`: those that name the job; `prefixes`: how the names of all begin that
    tell of a rank. A child process that inherits these would start MPI as a rank, and end the job.
    """

    name: str
    rank: str
    size: str
    jobs: tuple[str, ...]
    prefixes: tuple[str, ...]


# Only a rank's own variables of Slurm: a program may need the others to start jobs by srun.
_OF_SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_GTIDS", "SLURM_TASK_PID", "SLURM_STEPID", "SLURM_STEP_")
_OPEN_MPI = _Launcher("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", (), ("OMPI_",))
_SRUN = _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", (), _OF_SLURM)
_LAUNCHERS = (
    _OPEN_MPI,
    _SRUN,  # before the next two, because srun --mpi=pmix and --mpi=pmi2 set their variables beside its own
    _Launcher("", "PMIX_RANK", "", ("PMIX_NAMESPACE",), ("PMIX_", "PRTE_")),  # Open MPI's mpirun, too; no size
    _Launcher(
        "an mpirun of MPICH's family",
        "PMI_RANK",
        "PMI_SIZE",
        ("PMI_JOBID", "PALS_APID", "PMI_PORT"),  # MPICH's own names none, but has a socket to each rank
        ("PMI_", "PALS_", "HYDI_", "HYDRA_", "MPIR_CVAR_"),
    ),
    _Launcher("MVAPICH's mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", (), ("MV2_COMM_WORLD_",)),
)
_SOCKET_VARIABLE = "PMI_FD"

LAUNCHER_PREFIXES = tuple(prefix for each in _LAUNCHERS for prefix in each.prefixes)

ULFM_VARIABLE = "OMPI_MCA_mpi_ft_enable"
"""Open MPI's `mpirun --with-ft ulfm` sets it for its ranks; see `is_on`."""

# torchrun, and accelerate launch, which calls it, set the first one. They and deepspeed set all the others; Kubernetes sets some.
_TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
_TORCH_VARIABLES = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")).keys()
_DROPPED_OF_TORCH = {_TORCHRUN_VARIABLE, *_TORCH_VARIABLES, "LOCAL_WORLD_SIZE", "MASTER_PORT"}
_SHOWN_CHARACTERS = 200
_ALERT = "log.on_event"  # a setting of mpitrain

_MARK = "MPITRAIN_RANK_PROCESS"
"""The variable in which a rank leaves its process and job: what it starts is no rank."""
OF_JOB = {
    _MARK, "MPITRAIN_TTY", "MPITRAIN_STOP_FILE", "MPITRAIN_FAILURE_FILE",
    "MPITRAIN_LAUNCH", "MPITRAIN_MARKS", "MPITRAIN_LEASE", "MPITRAIN_SUPERVISOR",
}  # fmt: skip
"""The variables that mpirun/train and the supervisor set for the ranks of one job. The supervisor ends what has its id."""


def environment_of_program() -> dict[str, str]:
    """The environment for a program that a rank starts, such as `subprocess.run(..., env=collectives.environment_of_program())`.

    It is this process's, without what its launcher, `mpirun/train` and a supervisor, or the rank itself for torch.distributed, have set
    for it. So the program is no rank, may be a job of one rank, and may go on after the rank.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHER_PREFIXES) and name not in _DROPPED_OF_TORCH | OF_JOB
    }


class _Told(NamedTuple):
    """What a launcher has told this process; -1: nothing."""

    launcher: _Launcher
    rank: int
    size: int


def _told(environ: Mapping[str, str] = os.environ) -> list[_Told]:
    """What launchers have told this process, in the order of _LAUNCHERS.

    An mpirun may run within a step of srun, whose variables its ranks inherit. They are left out if they say something else.
    """

    def number(name: str) -> int:
        return int(text) if (text := environ.get(name, "")).isdigit() else -1

    def contradicts(one: _Told, other: _Told) -> bool:
        return any(-1 != mine != its != -1 for mine, its in zip(one[1:], other[1:], strict=True))

    told = [_Told(each, number(each.rank), number(each.size)) for each in _LAUNCHERS]
    told = [each for each in told if each[1:] != (-1, -1)]
    return [each for each in told if each.launcher is not _SRUN or not any(contradicts(each, other) for other in told)]


def launched_rank() -> int:
    """This process's rank from its launcher's variables, without starting MPI; -1 without a launcher, and in the child of a rank."""
    return -1 if _parent_rank() else _inherited_rank()


def _inherited_rank() -> int:
    """The rank in the launcher's variables, also in the child of a rank; -1 without a launcher."""
    return next((each.rank for each in _told() if each.rank >= 0), -1)


def leave_mark() -> None:
    """Note in the environment, which children inherit, that this process is a rank."""
    name, socket = _job()
    if name or socket:
        os.environ[_MARK] = f"{os.getpid()} {socket or '-'} {name}"


def check_no_child() -> None:
    """RuntimeError in a program that a rank has started: it has the launcher's variables, so MPI would take it for the rank.

    A program that starts a rank is not meant, nor one that a launcher within a rank has started, which is a rank of another job.
    """
    if parent := _parent_rank():
        raise RuntimeError(
            f"this program (process {os.getpid()}) was started by a rank (process {parent}), and MPI would take it for that rank, and "
            "end the job; expected collectives.world() in ranks alone. To run the program as a job of one rank, start it with "
            "env=collectives.environment_of_program()"
        )


def _parent_rank() -> int:
    """The process of the rank that has started this process; 0 if none has, or this process is a rank of another job."""
    try:
        process, socket, name = os.environ[_MARK].split(" ", 2)
        parent = int(process)
    except (KeyError, ValueError):
        return 0
    name_here, socket_here = _job()
    if parent == os.getpid() or name != name_here or (not name and _SOCKET_VARIABLE not in os.environ):
        return 0
    # Children do not inherit the socket, and another launcher makes a new one.
    return parent if socket_here in ("", socket) else 0


def _job() -> tuple[str, str]:
    """The name of this process's job, and the socket to its launcher; "" for what it does not have."""
    names = (os.environ.get(variable, "") for launcher in _LAUNCHERS for variable in launcher.jobs)
    name, socket = next(filter(None, names), ""), ""
    with suppress(KeyError, ValueError, OSError):
        found = os.fstat(int(os.environ[_SOCKET_VARIABLE]))
        if stat.S_ISSOCK(found.st_mode):
            socket = str(found.st_ino)
    return name, socket


def launched_size() -> int:
    """The number of ranks from the launcher's variables, without starting MPI; 1 without a launcher, or if it does not tell."""
    return next((each.size for each in _told() if each.size >= 0 and each.rank == _inherited_rank()), 1)


def job_name() -> str:
    """The launcher's name of this job, the same on all its ranks; empty if the launcher tells none, as MPICH's."""
    return _job()[0]


class Daemon:
    """The process of the launcher on this host that has started this rank, directly or by a wrapper such as a shell."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}  # of this process and its wrappers, each with its parent
        variables = [each.launcher.rank for each in _told() if each.rank >= 0]
        process = os.getpid()
        while variables and (parent := _parent_of(process)) > 1:
            self._parents[process] = parent
            # The launcher sets one for what it starts, and may itself have others.
            if not _has_variables(parent, variables):
                break
            process = parent

    def age_s(self) -> float:
        """The seconds since that process has started; infinite if no launcher has started this rank."""
        return age_s(list(self._parents.values())[-1]) if self._parents else math.inf

    def has_died(self) -> bool:
        """Whether that process has ended. False if no launcher has started this rank."""
        return any(_parent_of(process) != parent for process, parent in self._parents.items())


def _parent_of(process: int) -> int:
    """The id of a process's parent; 0 if the process has ended."""
    if process == os.getpid():
        return os.getppid()
    fields = stat_fields(process)
    return int(fields[1]) if fields else 0


def _has_variables(process: int, names: Iterable[str]) -> bool:
    """Whether a process was started with all of these variables."""
    try:
        its = {each.partition(b"=")[0] for each in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")}
    except OSError:  # another user's process: no wrapper
        return False
    return its.issuperset(map(str.encode, names))


def launcher_name(environ: Mapping[str, str] = os.environ) -> str:
    """The launcher of this job in words, from its variables; empty without one."""
    launcher = next((each.launcher for each in _told(environ) if each.size >= 0), None)
    if launcher is None:
        return ""
    return f"{launcher.name} {environ.get('OMPI_VERSION', '') if launcher is _OPEN_MPI else ''}".strip()


def is_on(value: str) -> bool:
    """Whether a setting of Open MPI is true."""
    return value.lower() in ("1", "true", "yes", "on", "t", "y")


def is_live_terminal() -> bool:
    """Whether the output of this process goes to a terminal.

    mpirun forwards the output of ranks, and may give a rank a pseudo-terminal although mpirun itself writes to a file. So a rank
    cannot find out by itself: mpirun/train sets MPITRAIN_TTY.
    """
    told = os.environ.get("MPITRAIN_TTY")
    return told == "1" if told is not None else _inherited_rank() < 0 and sys.stdout.isatty()


def check_main_program() -> None:
    """RuntimeError in a process that multiprocessing has spawned, such as a worker of a DataLoader, while it imports the main program.

    It would start MPI, and then do the work of the program again.
    """
    processes = sys.modules.get("multiprocessing.process")  # a spawned process has it
    if processes is not None and getattr(processes.current_process(), "_inheriting", False):
        raise RuntimeError(
            "this is a spawned process, which imports the main program, and MPI must not start in it; expected the work of the program "
            'under `if __name__ == "__main__":`'
        )


def check_launcher(size: int, library: str, environ: Mapping[str, str] = os.environ) -> None:
    """RuntimeError if a launcher has started several ranks, but the MPI library `library` sees only this process: `size` is 1.

    This happens with the mpirun of one MPI and the library of another, and with torchrun, which starts no ranks of MPI. Each rank would
    be a separate job that writes to the same folders. A launcher of MPI inside another launcher's job may start a single process, so
    there is no error if one of their variables is 1.
    """
    if size > 1:
        return
    _check_torch_launcher(library, environ)
    # A child process of a task of srun inherits its variables, and may run alone.
    is_task = environ.get("SLURM_TASK_PID") == str(os.getpid())
    told = [each for each in _told(environ) if each.size >= 0 and (is_task or each.launcher is not _SRUN)]
    if not told or min(each.size for each in told) <= 1:
        return
    launcher, _, number = told[0]
    if launcher is _SRUN:
        remedy = "pass srun the --mpi= that this library was built for, such as --mpi=pmix (srun --mpi=list shows all values)"
    else:
        remedy = (
            f"start the job by the mpirun of {library}, or let MPI4PY_LIBMPI name the libmpi.so of the launcher's MPI"
        )
    raise RuntimeError(
        f"{launcher.name} has started {number} ranks ({launcher.size}={number}), but MPI in this process is {library}, which knows 1 "
        "rank; expected a launcher and a library of the same MPI, because each rank would be a separate job that writes to the same "
        f"files: {remedy}. "
        f"{_to_run_alone(each.launcher.size for each in told)}"
    )


def _check_torch_launcher(library: str, environ: Mapping[str, str]) -> None:
    """RuntimeError if a launcher of torch.distributed has started this process, which MPI takes for a job of one rank."""
    size = environ.get("WORLD_SIZE", "")
    number = int(size) if size.isdigit() else 0
    is_of_torchrun = _TORCHRUN_VARIABLE in environ
    if number == 1 or not (is_of_torchrun or (number and environ.keys() >= _TORCH_VARIABLES)):
        return
    launcher = "torchrun" if is_of_torchrun else "a launcher of torch.distributed, such as deepspeed,"
    if any(name.startswith("ACCELERATE_") for name in environ):
        launcher = "accelerate launch"
    shown = {name: environ[name] for name in (_TORCHRUN_VARIABLE, *_TORCH_VARIABLES) if name in environ}
    of_node = environ.get("LOCAL_WORLD_SIZE", size)
    hosts = f" -H HOST:{of_node},..." if of_node != size else ""
    program = without_secrets(_command())
    program = program if len(program) <= _SHOWN_CHARACTERS else f"{program[:_SHOWN_CHARACTERS]} ..."
    raise RuntimeError(
        f"{launcher} has started {number or 'the'} processes ({', '.join(f'{name}={its}' for name, its in shown.items())}), but MPI "
        f"({library}), which joins the ranks here, knows 1 rank; expected mpirun or srun to start the ranks, because each process "
        f"would be a separate job that writes to the same files: mpirun -np {number or 'N'}{hosts} {program}. {_to_run_alone(shown)}"
    )


def _command() -> str:
    """The command of this process, without the words that torch's launchers add: -u before the program, --local_rank after it."""
    words = _without_alert(sys.orig_argv[1:])
    end = 0  # of Python's own options
    while words[end : end + 1] and words[end].startswith("-") and words[end] not in ("-m", "-c"):
        end += 2 if words[end] in ("-W", "-X") else 1
    first = end + (2 if words[end : end + 1] in (["-m"], ["-c"]) else 1)  # of the program's words
    is_added = re.fullmatch("--local[-_]rank=[0-9]+", "".join(words[first : first + 1]))
    options = (word for word in words[:end] if word != "-u")
    return shlex.join(("python", *options, *words[end:first], *words[first + bool(is_added) :]))


def _without_alert(words: Iterable[str]) -> list[str]:
    """The words with *** for the command of log.on_event, which may have a secret, such as the address of a web hook."""
    shown, is_next, may_follow = list[str](), False, False
    for word in words:
        if is_next or (may_follow and not word.startswith("--")):
            shown += [HIDDEN] * is_next
            is_next = False
            continue
        flag, equals, _ = word.partition("=")
        may_follow = flag.startswith("--") and flag[2:].replace("-", "_") == _ALERT
        is_next = may_follow and not equals
        shown.append(f"{flag}={HIDDEN}" if may_follow and equals else word)
    return shown


def _to_run_alone(variables: Iterable[str]) -> str:
    return (
        f"To run one process alone, remove the launcher's variables: env{''.join(f' -u {each}' for each in variables)}"
    )
