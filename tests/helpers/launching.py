"""Starting real jobs in tests, and sending them signals.

    result = launch(2, "-m", "mpitrain", "--train.steps", "5", timeout_s=60)
    assert result.returncode == 0, str(result)

    result = launch(2, "-m", "mpitrain", when="step 30", send=signal.SIGUSR1)      # to mpirun, once that text appears

`launch` runs `mpirun -np N python ARGS...` with the mpirun and the settings of ./mpirun/train (from mpirun/lib.sh), for
Open MPI and MPICH alike; `run` runs any command in the same way. Each command is the leader of a session of its own.
At the timeout all processes of that session are killed, by their ids, and the test fails with what was printed.
"""

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from collectives.launcher import LAUNCHER_PREFIXES
from mpitrain.job.elastic.supervisor.mpi_files.sessions import PLACE_PREFIX, VARIABLES

ROOT = Path(__file__).resolve().parents[2]

YIELDS = {"OMPI_MCA_mpi_yield_when_idle": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "10"}
"""A rank that waits gives its core away, also in a job with a core for each rank: other jobs of the tests run at the same time."""


@dataclass(frozen=True)
class Result:
    """What a command that has ended left."""

    returncode: int  # as subprocess has it: -N when signal N ended the command itself
    stdout: str
    stderr: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"exit code {self.returncode} after {self.seconds:.1f} s"
            f"\n-- stdout --\n{self.stdout}\n-- stderr --\n{self.stderr}"
        )


def without_names(text: str) -> str:
    """A report without the hosts and processes of ranks: "rank 1 has waited" instead of "rank 1 on host1 (process 31) has waited"."""
    return re.sub(r" on \S+ \(process(es)? [\d, ]+\)", "", text)


def launch(
    num_ranks: int,
    *args: str,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    **of_run: object,
) -> Result:
    """`mpirun OPTIONS -np num_ranks python args...`. `env` is added to the environment; the other arguments are `run`'s."""
    mpirun, settings = job_environment(num_ranks)
    command = [mpirun, *options, "-np", str(num_ranks), sys.executable, *args]
    with own_session() as session, own_segments() as segments:
        return run(command, env={**settings, **session, **segments, **(env or {})}, **of_run)  # type: ignore[arg-type]


@contextlib.contextmanager
def own_session() -> Iterator[dict[str, str]]:
    """A folder for the files of one mpirun of Open MPI, as variables; it is removed with what a killed one left.

    Its own choice is named by its process id: after a kill -9 it stays, and no mpirun with this id starts again.
    """
    with tempfile.TemporaryDirectory(prefix=PLACE_PREFIX, ignore_cleanup_errors=True) as folder:
        yield dict.fromkeys(VARIABLES, folder)


@contextlib.contextmanager
def own_segments() -> Iterator[dict[str, str]]:
    """A folder for Open MPI's shared memory of one job, as a variable; it is removed with what killed ranks left.

    Open MPI 5 names these files by a hash of 16 bits of mpirun's process id. Two jobs at the same time, as CI runs them, write into the
    memory of each other where the hashes are equal, and die of SIGSEGV in mca_btl_sm_poll_handle_frag.
    """
    shared_memory = Path("/dev/shm")
    if not shared_memory.is_dir():
        yield {}
        return
    with tempfile.TemporaryDirectory(dir=shared_memory, prefix="mpitrain-job-", ignore_cleanup_errors=True) as folder:
        yield {"OMPI_MCA_btl_sm_backing_directory": folder}


def collectives_alone(*arguments: str) -> Result:
    """`python -m collectives` without mpirun, on a terminal of 100 columns."""
    return run([sys.executable, "-m", "collectives", *arguments], cwd=ROOT, env={"COLUMNS": "100"})


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout_s: float = 60.0,
    when: str | None = None,
    after_s: float | None = None,
    send: int = signal.SIGUSR1,
    during: Callable[[int], None] | None = None,
) -> Result:
    """Run `command` to its end. `env` is added to this process's environment, less what an MPI launcher put there.

    Signal `send` goes to the command once the text `when` stands in its output, or `after_s` seconds after its start. `during(pid)` is
    called after its start.
    """
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        env={**clean_environment(), **(env or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    output = [bytearray(), bytearray()]
    seen = threading.Event()

    def read(stream: IO[bytes], into: bytearray) -> None:
        while chunk := os.read(stream.fileno(), 65536):
            into += chunk
            if when is not None and when.encode() in into:
                seen.set()

    readers = [
        threading.Thread(target=read, args=pair, daemon=True)
        for pair in zip((process.stdout, process.stderr), output, strict=True)
    ]
    for reader in readers:
        reader.start()

    failure = None
    try:
        if during is not None:
            during(process.pid)
        if after_s is not None:
            time.sleep(after_s)
        if when is not None:
            while not seen.wait(0.01) and process.poll() is None:
                if time.monotonic() - start > timeout_s:
                    break
            # what was printed last may not have been read yet when the command has already ended
            if not seen.wait(1.0):
                failure = f"{when!r} did not appear"
        if failure is None and (when is not None or after_s is not None):
            process.send_signal(send)
        process.wait(max(0.0, timeout_s - (time.monotonic() - start)) if failure is None else 0.0)
    except subprocess.TimeoutExpired:
        failure = failure or f"not ended after {timeout_s:g} s"
    finally:
        if process.poll() is None:
            end_session(process)
    for reader in readers:
        reader.join(5.0)
    seconds = time.monotonic() - start
    process.stdout.close()
    process.stderr.close()
    stdout, stderr = (bytes(part).decode(errors="replace") for part in output)
    result = Result(process.returncode, stdout, stderr, seconds)
    if failure is not None:
        pytest.fail(f"{failure}: {' '.join(map(str, command))}\n{result}")
    return result


def clean_environment() -> dict[str, str]:
    """This process's environment without the variables by which an MPI launcher speaks to its ranks."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}


@functools.cache
def job_environment(num_ranks: int) -> tuple[str, dict[str, str]]:
    """The mpirun that setup chose, and the environment that ./mpirun/train would start `num_ranks` ranks with, and YIELDS."""
    script = '. "$1"; load_mpi; mpi_environment "$2"; printf "%s\\0" "$mpirun"; env -0'
    command = ["bash", "-c", script, "bash", str(ROOT / "mpirun/lib.sh"), str(num_ranks)]
    environment = {**clean_environment(), **YIELDS}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=20).stdout
    mpirun, *pairs = answer.rstrip("\0").split("\0")
    return mpirun, dict(pair.split("=", 1) for pair in pairs)


def is_open_mpi() -> bool:
    """Whether that mpirun is Open MPI's."""
    mpirun, settings = job_environment(1)
    return (
        "Open MPI"
        in subprocess.run([mpirun, "--version"], env=settings, capture_output=True, text=True, timeout=20).stdout
    )


def session_processes(session: int) -> list[int]:
    """The ids of the processes in the session that process `session` leads.

    Open MPI's ranks are in mpirun's. MPICH's are each in one of their own, but end when their mpirun is gone.
    """
    ids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (name) state ppid pgrp session ...; a name may hold blanks and brackets
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            ids.append(int(stat.parent.name))
    return ids


def rank_of(pid: int) -> int | None:
    """The rank of a Python process of a job of Open MPI; None for another process."""
    try:
        names = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        is_python = b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
    except OSError:
        return None
    ranks = [int(name.partition(b"=")[2]) for name in names if name.startswith(b"OMPI_COMM_WORLD_RANK=")]
    return ranks[0] if ranks and is_python else None


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill `process`, which leads a session, and all processes of it."""
    process.terminate()  # mpirun then removes its own files
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(3.0)
    for pid in session_processes(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
