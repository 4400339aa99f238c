"""Children that a rank forks: they end as in any Python program, and cannot use their parent's communicator."""

from pathlib import Path

import pytest
from launching import ROOT, launch

HEADER = (
    "import os, sys, threading, time\nimport numpy as np, collectives\ncomm = collectives.world()\nx = np.ones(4)\n"
)


# What ends a child, its exit status, and what it prints to stderr.
ENDS = {
    "sys.exit()": (0, ""),
    "sys.exit(3)": (3, ""),
    "sys.exit('in words')": (1, "in words\n"),
    "try:\n    sys.exit(3)\nexcept SystemExit:\n    sys.exit(4)": (4, ""),
    "int('x')": (1, "ValueError: invalid literal for int() with base 10: 'x'\n"),
    "raise SystemExit(3)": (3, ""),
    "os._exit(5)": (5, ""),
    "thread = threading.Thread(target=lambda: 1 / 0)\nthread.start()\nthread.join()\nsys.exit(6)": (
        6,
        "ZeroDivisionError: division by zero\n",
    ),
    "thread = threading.Thread(target=lambda: sys.exit(1))\nthread.start()\nthread.join()\nsys.exit(7)": (7, ""),
    "import atexit\natexit.register(lambda: print('exit hook', file=sys.stderr))\nsys.exit(8)": (8, "exit hook\n"),
    "os.waitpid(pid, 0) if (pid := os.fork()) else sys.exit(9)\nsys.exit(10)": (10, ""),
}


@pytest.mark.rest
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_child_ends_with_its_own_exit_status_and_the_job_goes_on(num_ranks: int) -> None:
    script = f"""
for what in {list(ENDS)!r} if comm.rank == 0 else []:
    if (pid := os.fork()) == 0:
        print("-- child", file=sys.stderr, flush=True)
        exec(what)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
comm.barrier()
print("done", comm.all_reduce(np.ones(1))[0], flush=True)
"""
    result = launch(num_ranks, "-c", HEADER + script, cwd=ROOT, timeout_s=40)
    assert result.returncode == 0, str(result)
    assert result.stdout.count(f"done {num_ranks}.0") == num_ranks, str(result)
    statuses = [int(line) for line in result.stdout.splitlines() if line.isdecimal()]
    assert statuses == [status for status, _ in ENDS.values()], str(result)
    shown = result.stderr.split("-- child\n")[1:]
    for (what, (_, said)), words in zip(ENDS.items(), shown, strict=True):
        assert said in words and bool(words) == bool(said), f"{what}: {words}"
    assert "[rank" not in result.stderr, "a child is no rank"


def test_a_child_where_mpi4py_came_first() -> None:
    """mpi4py has then decided to end MPI in children too: they leave before that."""
    script = """
for what in ["sys.exit(3)", "int('x')"] if comm.rank == 0 else []:
    if (pid := os.fork()) == 0:
        exec(what)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
comm.barrier()
"""
    result = launch(2, "-c", "from mpi4py import MPI\n" + HEADER + script, cwd=ROOT, timeout_s=40)
    assert (result.returncode, result.stdout) == (0, "1\n1\n"), str(result)
    assert result.stderr.count("call collectives.world() before mpi4py.MPI is imported") == 1, str(result)


@pytest.mark.rest
@pytest.mark.parametrize("how", ["script.py", "-mscript"])
def test_a_child_that_comes_to_the_end_of_the_script(how: str, tmp_path: Path) -> None:
    script = """
pid = os.fork() if comm.rank == 0 else -1
if pid > 0:
    print("status", os.waitpid(pid, 0)[1], flush=True)
if pid:
    comm.barrier()
"""
    (tmp_path / "script.py").write_text(HEADER + script)
    result = launch(2, how, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, timeout_s=40)
    assert (result.returncode, result.stdout, result.stderr) == (0, "status 0\n", ""), str(result)


@pytest.mark.rest
@pytest.mark.parametrize("thread", ["0", "1"])
def test_a_child_cannot_use_its_parent_s_communicator(thread: str) -> None:
    script = """
group, mesh = comm.split(0), collectives.Mesh(comm, {"dp": 2})
for _ in range(3):
    comm.all_reduce(x)  # has a plan from then on
comm.all_reduce(x, async_op=True).wait()  # the first one prepares the progress thread, which all ranks do together
waiting = comm.irecv(np.empty(1), 1) if comm.rank == 0 else None
if comm.rank == 1:
    comm.recv(np.empty(1), 0, tag=1)  # after the child is gone
work = comm.all_reduce(np.ones(1), async_op=True)

def in_group():
    with comm.group():
        comm.all_reduce(x)

calls = {
    "with a plan": lambda: comm.all_reduce(x),
    "all_reduce": lambda: comm.all_reduce(np.ones(9), algorithm="ring"),
    "all_gather": lambda: comm.all_gather(np.ones(8), x),
    "reduce": lambda: comm.reduce(x),
    "all_to_all": lambda: comm.all_to_all(np.ones(4), x),
    "async": lambda: comm.all_reduce(x, async_op=True),
    "send": lambda: comm.send(x, 1),
    "irecv": lambda: comm.irecv(x, 1),
    "barrier": comm.barrier,
    "object": lambda: comm.broadcast_object(1),
    "split": lambda: comm.split(0),
    "empty": lambda: comm.empty(4, np.float32),
    "group()": in_group,
    "group": lambda: group.all_reduce(x),
    "mesh": lambda: mesh["dp"].all_reduce(x),
    "node": lambda: comm.node.barrier(),
    "world": lambda: collectives.world().barrier(),
    "wait": work.wait,
    "done": work.done,
    "wait of a message": lambda: waiting.wait(),
    "done of a message": lambda: waiting.done(),
}
if comm.rank == 0:
    if (pid := os.fork()) == 0:
        for name, call in calls.items():
            try:
                call()
                print(name, "has worked", flush=True)
            except RuntimeError as error:
                assert "a forked child cannot use its parent's communicator; start a new process" in str(error), error
        group.free()
        sys.exit(3)
    print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    comm.send(np.ones(1), 1, tag=1)
else:
    comm.send(np.ones(1), 0)
print("done", work.wait(), comm.all_reduce(np.ones(4)), flush=True)
if waiting:
    waiting.wait()
"""
    env = {"MPITRAIN_PROGRESS_THREAD": thread}
    result = launch(2, "-c", HEADER + script, cwd=ROOT, env=env, timeout_s=40)  # a child that waits is killed there
    assert (result.returncode, result.stderr) == (0, ""), str(result)
    assert sorted(result.stdout.splitlines()) == ["done [2.] [2. 2. 2. 2.]"] * 2 + ["status 3"], str(result)
