"""What only a real job shows: an error on one rank ends it, memory is given back however it ends, and the command line."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from extent import extent
from launching import ROOT, Result, collectives_alone, launch, without_names

from collectives.environment import CHOICES
from collectives.schedules import BUILDERS
from collectives.selection.selector import ALGORITHMS

# With MPI's start and on a busy machine; a rank that nobody ends would wait until the time-out of `launch`.
PROMPT_S = 25


def job(num_ranks: int, script: str, env: Mapping[str, str] | None = None) -> Result:
    header = "import numpy as np, collectives\ncomm = collectives.world()\n"  # no torch, which takes seconds to import
    return launch(num_ranks, "-c", header + script, cwd=ROOT, env=env, timeout_s=90)


# Errors


def test_an_uncaught_exception_on_one_rank_ends_the_job_and_names_it() -> None:
    result = job(3, "if comm.rank == 1:\n    raise LookupError('no such thing')\ncomm.barrier()\n")
    assert result.returncode != 0, str(result)
    assert result.seconds < PROMPT_S, str(result)
    assert "[rank 1] Traceback (most recent call last):" in result.stderr, str(result)
    assert "[rank 1] LookupError: no such thing" in result.stderr, str(result)
    assert "[rank 0]" not in result.stderr, str(result)


def test_an_uncaught_exception_in_a_thread_ends_the_job_too() -> None:
    script = """
import _thread, sys, threading, time
def work():
    raise LookupError("in the background")
if comm.rank == 1:
    for quiet in (lambda: exec("raise SystemExit(3)"), sys.exit, lambda: sys.exit(3)):  # ends its thread alone
        thread = threading.Thread(target=quiet)
        thread.start()
        thread.join()
    _thread.start_new_thread(sys.exit, (4,))
    time.sleep(0.2)
    print("still here", flush=True)
    threading.Thread(target=work).start()
comm.barrier() if comm.rank == 0 else comm.recv(np.zeros(1), 0)
"""
    result = job(2, script)
    assert result.returncode != 0, str(result)
    assert result.seconds < PROMPT_S, str(result)
    assert "[rank 1] LookupError: in the background" in result.stderr, str(result)
    assert "still here" in result.stdout, str(result)
    assert "SystemExit" not in result.stderr and "sys.exit" not in result.stderr, str(result)


@pytest.mark.rest
def test_a_program_s_own_hooks_are_called_before_the_job_ends() -> None:
    hooks = """
import sys, threading
def show(kind, error, trace):
    print("mine:", kind.__name__, error, flush=True)
    raise OSError("a hook's own error")  # changes nothing
sys.excepthook = show
threading.excepthook = lambda args: print("mine in a thread:", args.exc_type.__name__, flush=True)
import collectives, numpy as np
comm = collectives.world()
"""
    in_main = hooks + "if comm.rank == 1:\n    raise LookupError('no such thing')\ncomm.barrier()\n"
    result = launch(2, "-c", in_main, cwd=ROOT, timeout_s=60)
    assert result.returncode == 1, str(result)
    assert result.stdout.splitlines() == ["mine: LookupError no such thing"], str(result)
    assert "[rank 1] LookupError: no such thing" in result.stderr, str(result)
    assert "OSError: a hook's own error" in result.stderr, str(result)
    in_thread = (
        "if comm.rank == 1:\n    threading.Thread(target=lambda: 1 / 0).start()\ncomm.recv(np.ones(1), 1 - comm.rank)"
    )
    result = launch(2, "-c", hooks + in_thread, cwd=ROOT, timeout_s=60)
    assert result.returncode == 1, str(result)
    assert result.stdout.splitlines() == ["mine in a thread: ZeroDivisionError"], str(result)
    assert "[rank 1] ZeroDivisionError: division by zero" in result.stderr, str(result)
    of_all = hooks + "with comm.together('reading'):\n    int('x')\n"
    result = launch(2, "-c", of_all, cwd=ROOT, timeout_s=60)
    assert result.returncode == 1, str(result)
    assert result.stdout.count("mine: ValueError reading: invalid literal") == 2, (
        "on each rank, as without this library"
    )
    assert "MPI_ABORT" not in result.stderr, str(result)


@pytest.mark.rest
def test_a_traceback_is_seen_where_torch_distributed_has_started() -> None:
    # Its own hook keeps what is written to stderr until ours returns, which ends the job.
    script = """
from collectives.bench.kit.torch_group import torch_group
with torch_group(comm):
    if comm.rank == 1:
        raise LookupError("no such column")
    comm.barrier()
"""
    result = job(2, script)
    assert result.returncode == 1, str(result)
    assert "[rank 1] LookupError: no such column" in result.stderr, str(result)


@pytest.mark.rest
def test_an_error_of_all_ranks_is_printed_once_and_they_end_by_themselves() -> None:
    script = "with comm.together('reading'):\n    if comm.rank == 1:\n        raise LookupError('no such column')\n"
    result = job(3, script)
    assert result.returncode != 0, str(result)
    assert result.seconds < PROMPT_S, str(result)
    assert result.stderr.count("LookupError: reading: no such column [rank 1 of 3]") == 1, str(result)
    assert "[rank 1] LookupError: no such column" in result.stderr, "the cause, with its own traceback"
    assert "MPI_ABORT" not in result.stderr, str(result)


def test_an_error_of_one_group_reaches_the_others() -> None:
    script = """
group = comm.split(comm.rank // 2)
if comm.rank // 2 == 1:
    with group.together():
        int("x")
comm.barrier()
"""
    result = job(4, script)
    assert result.returncode != 0, str(result)
    assert result.seconds < PROMPT_S, str(result)
    assert "ValueError: invalid literal" in result.stderr, str(result)


@pytest.mark.rest
@pytest.mark.parametrize("name", ["MPITRAIN_NOTICE_S", *extent(list(CHOICES)[:1], [*CHOICES, "MPITRAIN_DEADLINE_S"])])
def test_a_setting_that_is_none_is_an_error_of_all_ranks_at_the_start(name: str) -> None:
    script = """
import os, collectives
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":  # as where the ranks' environments differ
    os.environ[{name!r}] = "foo"
try:
    collectives.world()
except ValueError as error:
    print(collectives.on_all_ranks(error), error, flush=True)
"""
    result = launch(2, "-c", script.format(name=name), cwd=ROOT, timeout_s=60)
    assert result.returncode == 0, str(result)
    assert result.stdout.count(f"True {name} is 'foo'; expected ") == 2, str(result)


# Memory of the node


@pytest.fixture
def small_shm(tmp_path: Path) -> Iterator[Path]:
    """A shared-memory folder of 1 MiB."""
    folder = tmp_path / "shm"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small tmpfs")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.rest
def test_a_full_folder_is_a_clear_error_on_all_ranks(small_shm: Path) -> None:
    script = """
import torch
for allocate in (comm.node.shared, comm.empty):
    try:
        allocate(4 << 20, np.uint8)
    except OSError as error:
        assert collectives.on_all_ranks(error)
        print(f"rank {comm.rank}: {error}", flush=True)
x = comm.node.shared((comm.size, 1 << 17), torch.uint8)  # what still fits works, every page of it
x[comm.rank] = comm.rank + 1
comm.barrier()
assert [int(row.min()) for row in x] == [1, 2], x
print(f"rank {comm.rank}: done", flush=True)
"""
    result = job(2, script, env={"MPITRAIN_SHM_DIR": str(small_shm)})
    assert result.returncode == 0, str(result)
    for rank in range(2):
        lines = [line for line in result.stdout.splitlines() if line.startswith(f"rank {rank}: ")]
        assert [line.split(" MiB of node memory")[0] for line in lines[:2]] == [
            f"rank {rank}: cannot share 4",
            f"rank {rank}: cannot share 8",
        ], str(result)
        for line in lines[:2]:
            assert f"in {small_shm}: No space left on device: " in line, str(result)
            assert "iB are free; make it larger, or set MPITRAIN_SHM_DIR to a folder in memory that has more" in line
        assert lines[2:] == [f"rank {rank}: done"], str(result)
    assert not list(small_shm.iterdir())


ENDS = (
    "os.kill(os.getpid(), signal.SIGKILL)",
    "os.kill(os.getpid(), signal.SIGTERM)",
    "os.kill(os.getppid(), signal.SIGTERM); comm.recv(np.ones(1), 1 - comm.rank)",  # of mpirun, which ends its ranks
    "raise LookupError",
    "os._exit(0)",
)


@pytest.mark.parametrize("end", extent(ENDS[:1] + ENDS[2:4], ENDS))
def test_nothing_is_left_however_the_job_ends(tmp_path: Path, end: str) -> None:
    script = f"""
import os, signal
from pathlib import Path
arrays = [comm.node.shared(1 << 20, np.float32), comm.empty(1 << 20, np.float32)]
arrays[1] += 1
comm.all_reduce(arrays[1], algorithm="shared")
assert (arrays[1] == comm.size).all()
Path("{tmp_path}", f"was-here-{{comm.rank}}").touch()
comm.barrier()
{end}
"""
    folder = tmp_path / "shm"
    folder.mkdir()
    result = job(2, script, env={"MPITRAIN_SHM_DIR": str(folder)})
    assert len(list(tmp_path.glob("was-here-*"))) == 2, str(result)
    assert result.seconds < PROMPT_S, str(result)
    assert not list(folder.iterdir())


# The command line


def test_check_proves_every_schedule_without_mpi() -> None:
    result = collectives_alone("check", "--ranks", "2,5,33")
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if line.rstrip().endswith(" yes")]
    names = [(operation, algorithm) for operation, algorithms in BUILDERS.items() for algorithm in algorithms]
    assert [tuple(row[:2]) for row in rows] == names, result.stdout
    for row in rows:
        assert row[2:5] == ["2,", "5,", "33"], result.stdout
    assert ["reduce_scatter", "ring", "2,", "5,", "33", "32", "0.97", "32,", "0.97", "yes"] in rows, result.stdout


def test_check_fails_where_a_schedule_is_wrong() -> None:
    script = """
import sys
from dataclasses import replace
from collectives import cli
from collectives.schedules import BUILDERS, ring
def broken(setup):
    right = ring.all_reduce(setup)
    return replace(right, program=lambda rank: right.program(rank)[: -1 if rank == 2 else None])
def dear(setup):
    right = ring.all_gather(setup)
    return replace(right, cost=right.cost._replace(rounds=right.cost.rounds - 1))
BUILDERS["all_reduce"]["broken"] = broken
BUILDERS["all_gather"]["dear"] = dear
sys.exit(cli.main(["check", "--ranks", "2,4"]))
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1, result.stderr
    assert "all_reduce broken, 4 ranks: deadlock: ranks" in result.stdout
    assert "all_reduce broken, 2 ranks" not in result.stdout
    assert "all_gather dear, 2 ranks: costs 1 rounds and 1/2 of the buffer" in result.stdout
    rows = {tuple(line.split()[:2]): line.split() for line in result.stdout.splitlines() if line.strip()}
    assert rows["all_reduce", "broken"][2] == "2" and "NO" in rows["all_reduce", "broken"]
    assert rows["all_gather", "dear"][2] == "none" and "NO" in rows["all_gather", "dear"]
    assert rows["all_gather", "ring"][-1] == "yes"


def test_info_with_and_without_mpirun() -> None:
    for ranks, result in ((1, collectives_alone("info")), (2, launch(2, "-m", "collectives", "info", cwd=ROOT))):
        assert result.returncode == 0, result.stderr
        rows = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in result.stdout.splitlines() if line.strip())
        assert rows["ranks"] == str(ranks)
        assert rows["nodes"].startswith("1 (")
        assert "bfloat16" in rows["dtypes"]
        elsewhere = ("two_level", "encoded", "nccl")  # several nodes, GPUs
        here = [name for name in ALGORITHMS["all_reduce"] if name not in elsewhere]
        assert rows["all_reduce"] == ", ".join(("auto", *here))
        assert " free" in rows["shared memory"]
        assert rows["private memory of peers"] in ("read directly", "not readable: staged in node memory")
        assert rows["asynchronous operations"] in ("on a progress thread", "carried out at wait()")
        assert rows["CUDA-aware MPI"].startswith("no (")
        assert rows["codec of links"].split(" ")[0] in ("numpy", "c", "avx2", "avx512")
        assert result.stdout.count("mpi4py") == 1, "printed once"


BAD_INPUT: list[tuple[list[str], str]] = [
    (["bench", "--sizes", "1qB"], "argument --sizes: size '1qB'; expected bytes, 1 at least, such as 4096, 64KiB"),
    (["bench", "--sizes", "0"], "argument --sizes: size '0'; expected bytes, 1 at least, such as 4096, 64KiB"),
    (["bench", "--sizes", "4KiB..1KiB"], "argument --sizes: sizes '4KiB..1KiB'; expected a range that rises"),
    (["bench", "--dtype", "complex64"], "argument --dtype: dtype complex64 is not supported; expected one of"),
    (["bench", "--op", "sing"], "argument --op: invalid choice: 'sing'"),
    (["bench", "--peers", "nccl"], "argument --peers: invalid choice: 'nccl'; expected of mpi, gloo"),
    (["tune", "--seconds", "nan"], "argument --seconds: 'nan'; expected seconds, such as 0.5"),
    (["bench", "--rounds", "0"], "argument --rounds: '0'; expected a whole number of at least 1"),
    (["bench", "--json", "/not/there.json"], "No such file or directory: '/not/there.json'"),
    (["bench", "--codec", "--plot", "a.png"], "argument --plot: bench --codec draws no picture"),
    (["bench", "--codec", "--wire", "int8"], "argument --wire: bench --codec measures all formats"),
    (["check", "--ranks", "2,x"], "argument --ranks: 'x'; expected a whole number"),
    (["dance"], "invalid choice: 'dance'"),
]


def test_bad_input_is_one_line_on_one_rank() -> None:
    script = "import json, sys\nfrom collectives.cli import main\nprint([main(a) for a in json.loads(sys.argv[1])], flush=True)"
    result = launch(2, "-c", script, json.dumps([arguments for arguments, _ in BAD_INPUT]), cwd=ROOT)
    lines = [line for line in result.stderr.splitlines() if line.startswith("collectives: ")]
    assert len(lines) == len(BAD_INPUT), str(result)
    for line, (_, text) in zip(lines, BAD_INPUT, strict=True):
        assert text in line, str(result)
    assert "Traceback" not in result.stderr
    codes = str([2] * len(BAD_INPUT))
    assert result.returncode == 0 and result.stdout.split("\n") == [codes, codes, ""], str(result)


# one of each kind: refused by a command's parser, by the operating system, by the parser of all
@pytest.mark.parametrize(("arguments", "text"), [BAD_INPUT[0], *extent([], [BAD_INPUT[-3], BAD_INPUT[-1]])])
def test_a_command_with_bad_input_ends_with_an_error(arguments: list[str], text: str) -> None:
    result = launch(2, "-m", "collectives", *arguments, cwd=ROOT)
    assert result.returncode != 0, str(result)
    lines = [line for line in result.stderr.splitlines() if line.startswith("collectives: ")]
    assert len(lines) == 1, str(result)
    assert text in lines[0], str(result)
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.rest
def test_bench_needs_two_ranks() -> None:
    result = collectives_alone("bench")
    assert (result.returncode, result.stdout) == (2, "")
    assert "bench needs at least two ranks: mpirun -np 2 python -m collectives bench" in result.stderr


@pytest.mark.rest
def test_a_rank_that_exits_by_itself_with_an_error_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "leave.py"
    script.write_text(
        "import sys, collectives\n"
        "comm = collectives.world()\n"
        "try:\n"
        "    sys.exit(5)\n"
        "except SystemExit:\n"
        "    print('caught', flush=True)\n"
        "    if 'caught' in sys.argv:\n"
        "        sys.exit(0)\n"
        "comm.barrier()\n"
        "if comm.rank == 1 and 'leave' in sys.argv:\n"
        "    sys.exit(3)\n"
        "comm.barrier()\n"
    )
    left = launch(2, str(script), "leave", timeout_s=30)
    assert left.returncode != 0, str(left)
    assert "[rank 0] rank 1 has ended, and rank 0 waits for it in world (ranks 0, 1): #2 barrier" in without_names(
        left.stderr
    ), str(left)
    assert left.seconds < PROMPT_S, str(left)
    for how in ("stay", "caught"):
        stayed = launch(2, str(script), how, timeout_s=30)
        assert (stayed.returncode, stayed.stderr) == (0, ""), str(stayed)
        assert stayed.stdout.count("caught") == 2
