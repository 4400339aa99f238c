"""Ranks that wait for ever: who is named, and how the job ends. Real jobs, with deadlines of a second or two."""

import re
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
from extent import extent
from launching import ROOT, Result, launch, without_names

EXIT_CODE = 124
PROMPT_S = 10.0  # two on an idle machine
HOST = re.escape(socket.gethostname())
HEADER = "import os, signal, sys, time\nimport numpy as np, collectives\ncomm = collectives.world()\n"
X = "np.ones(4, np.float32)"


def job(num_ranks: int, script: str, *, timeout_s: float = 40, **env: str) -> Result:
    # killed by the time-out of `launch` where nothing ends it
    return launch(num_ranks, "-c", HEADER + script, cwd=ROOT, env=env, timeout_s=timeout_s)


def report(result: Result, waited: str, *, reporters: str = r"\d") -> list[str]:
    """The lines of the one report that a rank has printed, in a job that its deadline has ended."""
    assert result.returncode == EXIT_CODE, str(result)
    first = rf"\[rank ({reporters})\] rank \1 on {HOST} \(process \d+\) has waited \d+\.\d s in {re.escape(waited)}; the deadline is "
    heads = re.findall(first, result.stderr)
    assert len(heads) == 1, str(result)
    assert result.stderr.count("The job ends.") == 1, str(result)
    after = result.stderr.partition("The job ends.")[2]  # a notice has such lines, too
    lines = [line.split("] ", 1)[1] for line in after.splitlines() if line.startswith(f"[rank {heads[0]}]   ")]
    return [without_names(line) for line in lines]


def end_report(result: Result, first: str) -> list[str]:
    """The lines of the one report, after its `first`, in a job that ended because a rank had that others wait for."""
    assert result.returncode == 1, str(result)
    text = without_names(result.stderr)
    assert f"[rank 0] {first}" in text, str(result)
    assert text.count("The job ends.") == 1, str(result)
    return [line.removeprefix("[rank 0] ") for line in text.splitlines() if line.startswith("[rank 0]   ")]


@pytest.mark.rest
def test_a_rank_that_never_comes_is_named_with_the_place_where_it_is(tmp_path: Path) -> None:
    script = f"""
def load():
    time.sleep(60)
comm.barrier()
if comm.rank == 1:
    load()
comm.all_reduce({X})
"""
    result = job(
        3, script, MPITRAIN_NOTICE_S="1", MPITRAIN_DEADLINE_S="2.5", MPITRAIN_RECORD_DIR=str(tmp_path / "record")
    )
    notices = re.findall(r"\[rank (\d)\] notice: .*\n\[rank \d\] (.*)", result.stderr)
    assert len({rank for rank, _ in notices}) == 1, f"one of those that wait says it\n{result}"
    assert re.fullmatch(
        r"  ranks 0, 2: in world .* at <string>:10 in <module>, for \d\.\d s, waiting for rank 1",
        without_names(notices[0][1]),
    ), notices
    lines = report(result, "world (ranks 0-2): #2 all_reduce(4 x float32, op=sum)")
    assert re.fullmatch(r"  ranks 0, 2: in world .* by \w+, at <string>:10 in <module>, for \d\.\d s", lines[0]), lines
    assert lines[1].startswith("  rank 1: in no operation, main thread at <string>:6 in load, from <string>:9 "), lines
    assert lines[1].endswith("its last operation there: #1 barrier (ended)")
    assert lines[2:] == ["  => missing: rank 1 (is in no operation)"]
    files = {file.name: file.read_text() for file in (tmp_path / "record").iterdir()}
    assert sorted(files) == ["rank-0.txt", "rank-1.txt", "rank-2.txt"]
    assert "ended   world (ranks 0-2): #1 barrier" in files["rank-1.txt"]
    assert "begun   world (ranks 0-2): #2 all_reduce" in files["rank-2.txt"]


@pytest.mark.rest
def test_ranks_in_different_operations_are_named() -> None:
    script = f"""
group = comm.split(0)
if comm.rank == 1:
    time.sleep(0.7)  # so that rank 0 is the first to pass the deadline
    group.broadcast({X}, 1)
else:
    comm.all_reduce({X})
group.recv({X}, 1 - comm.rank)
"""
    lines = report(job(2, script, MPITRAIN_DEADLINE_S="1"), "world (ranks 0, 1): #2 all_reduce(4 x float32, op=sum)")
    # the root of a broadcast need not wait: it is then in the next operation
    assert "  => missing: rank 1 (is in an operation of another communicator)" in lines, lines
    assert any(
        re.search(r"^  rank 1: in group \d \(ranks 0, 1\): recv\(4 x float32, peer=0, tag=0\)", line) for line in lines
    )


@pytest.mark.rest
def test_a_stopped_rank_does_not_answer(tmp_path: Path) -> None:
    script = f"""
comm.barrier()
if comm.rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
comm.all_reduce({X})
"""
    result = job(2, script, MPITRAIN_NOTICE_S="0.5", MPITRAIN_DEADLINE_S="1", MPITRAIN_RECORD_DIR=str(tmp_path))
    lines = report(result, "world (ranks 0, 1): #2 all_reduce(4 x float32, op=sum)", reporters="1")
    waited = re.search(r"has waited (\d+\.\d) s in", result.stderr)
    assert waited and float(waited[1]) < 10, "a notice that still waits for an answer does not hold up the deadline"
    assert any(line.startswith("  rank 0: no answer yet; state of its process: T (stopped)") for line in lines), lines
    assert lines[-1] == "  => missing: rank 0 (gives no answer yet)"
    # mpirun lets a stopped process go on to end it: rank 0 may then write its own.
    assert "rank-1.txt" in {file.name for file in tmp_path.iterdir()}


ENDS = {
    "return": ("pass", "the script returned, or raised SystemExit"),
    "raise": ("raise SystemExit(3)", "the script returned, or raised SystemExit"),
    "sys.exit": ("sys.exit()", "the script returned, or raised SystemExit"),
    "sys.exit(3)": ("sys.exit(3)", "the script returned, or raised SystemExit"),
    "finalize": ("from mpi4py import MPI; MPI.Finalize(); time.sleep(60)", "the program called MPI.Finalize"),
}


@pytest.mark.rest
@pytest.mark.parametrize("how", extent(["return", "finalize", "sys.exit(3)"], list(ENDS)))
def test_a_rank_that_ends_while_others_wait_for_it_ends_the_job_at_once(how: str, tmp_path: Path) -> None:
    script = f"""
comm.barrier()
if comm.rank == 1:
    {ENDS[how][0]}
else:
    time.sleep(1.0)
    comm.all_reduce({X})
"""
    result = job(3, script, MPITRAIN_RECORD_DIR=str(tmp_path))
    lines = end_report(
        result, "rank 1 has ended, and ranks 0, 2 wait for it in world (ranks 0-2): #2 all_reduce(4 x float32, op=sum)."
    )
    place = re.fullmatch(r"  ranks 0, 2: in world .* by \w+, at <string>:10 in <module>, for (\d\.\d) s", lines[0])
    assert place and float(place[1]) < PROMPT_S, lines
    assert (
        lines[1]
        == f"  rank 1: in no operation, its program has ended: {ENDS[how][1]}; its last operation there: #1 barrier (ended)"
    )
    assert lines[2:] == [
        "  => missing: rank 1 (has ended)",
        "  => a rank must not end before the last operation in which it takes part",
    ]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank-0.txt", "rank-1.txt", "rank-2.txt"]


@pytest.mark.rest
@pytest.mark.parametrize(
    "waiting", ["irecv({x}, 0).wait()", *extent([], ["recv({x}, 0)", "send(np.ones(1 << 22), 0)"])]
)
def test_a_message_that_never_comes_from_a_rank_that_has_ended(waiting: str) -> None:
    """Rank 0 has ended, to which the others tell their ends; and it has sent two messages before."""
    script = f"""
if comm.rank == 0:
    comm.send({X}, 1)
    comm.send({X}, 1, tag=5)
else:
    comm.recv({X}, 0)
    comm.{waiting.format(x=X)}
"""
    lines = end_report(job(2, script), "rank 0 has ended, and rank 1 waits for it in world (ranks 0, 1): ")
    assert any(
        re.match(r"  rank 1: in world \(ranks 0, 1\): \w+\(.*peer=0, tag=0\), at <string>:10 ", line) for line in lines
    )


@pytest.mark.rest
def test_ranks_may_end_at_different_times() -> None:
    """While others compute, wait for each other, or finish what the one that has ended did its part of."""
    script = f"""
pairs, roots = comm.split(comm.rank // 2), comm.split(0)
roots.reduce({X}, 0, algorithm="tree")
if comm.rank == 3:
    comm.isend({X}, 2, tag=3)
if comm.rank >= 2:
    pairs.barrier()
if comm.rank == 2:
    time.sleep(2.5)
    comm.recv({X}, 3, tag=3)
if comm.rank < 2:
    if comm.rank == 1:
        time.sleep(2.5)
    pairs.all_reduce({X})
    time.sleep(comm.rank)
print("done", flush=True)
"""
    result = job(4, script)
    assert (result.returncode, result.stdout.count("done"), result.stderr) == (0, 4, ""), str(result)


@pytest.mark.rest
def test_what_was_issued_is_carried_out_before_the_end() -> None:
    script = f"""
work = comm.all_reduce({X}, async_op=True)
if comm.rank == 1:
    print("sum", work.wait()[0], flush=True)
"""
    for thread in "01":
        result = job(2, script, MPITRAIN_PROGRESS_THREAD=thread)
        assert (result.returncode, result.stdout, result.stderr) == (0, "sum 2.0\n", ""), str(result)


@pytest.mark.rest
@pytest.mark.parametrize("thread", ["0", "1"])
def test_async_op_on_some_ranks_only_is_reported(thread: str) -> None:
    script = f"""
work = comm.all_reduce({X}, async_op=comm.rank == 0)  # line 5
if comm.rank == 0:
    work.wait()
time.sleep(60)
"""
    result = job(2, script, MPITRAIN_DEADLINE_S="1", MPITRAIN_PROGRESS_THREAD=thread)
    assert result.returncode == EXIT_CODE, str(result)
    what = "world async_op (ranks 0, 1): #1 all_reduce" if thread == "0" else "world (ranks 0, 1): #1 preparing async"
    assert re.search(
        rf"\[rank \d\]   rank 0: in {re.escape(what)}.*, at <string>:5 in <module>", without_names(result.stderr)
    ), str(result)


@pytest.mark.rest
def test_messages_that_nobody_holds_at_the_end_of_a_rank() -> None:
    script = """
if comm.rank == 0:
    comm.isend(np.full(1 << 20, 7.0), 1)
    comm.irecv(np.empty(1 << 20), 1, tag=1)  # which nobody sends
else:
    time.sleep(1.0)
    print(np.unique(comm.recv(np.empty(1 << 20), 0)), flush=True)
"""
    result = job(2, script)
    assert (result.returncode, result.stdout, result.stderr) == (0, "[7.]\n", ""), str(result)


@pytest.mark.rest
def test_a_world_that_was_freed_is_made_anew() -> None:
    script = f"""
comm.all_reduce({X}, async_op=True)
comm.free()
again = collectives.world()
assert again is not comm and again is collectives.world()
print(again.all_reduce({X}, async_op=True).wait()[0], flush=True)
again.free()
if comm.rank == 1:
    time.sleep(0.5)  # mpirun may lose what a rank has printed just before another one ends the job
    raise KeyError("still ends the job")
collectives.world()
"""
    for thread in "01":
        result = job(2, script, MPITRAIN_PROGRESS_THREAD=thread)
        assert (result.returncode, result.stdout) == (1, "2.0\n2.0\n"), str(result)
        assert "[rank 1] KeyError: 'still ends the job'" in result.stderr, str(result)


# by which rank it is said: the one after it on the node
@pytest.mark.parametrize(
    "end",
    extent(
        ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"],
        ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)", "os.abort()", "import ctypes; ctypes.string_at(0)"],
    ),
)
@pytest.mark.parametrize("others", ["comm.barrier()", *extent([], ["time.sleep(30)", "comm.mpi.Barrier()"])])
def test_a_rank_that_dies_is_named_at_once(end: str, others: str) -> None:
    result = job(3, f"if comm.rank == 1:\n    {end}\n{others}\n")
    assert result.returncode != 0, str(result)
    assert result.seconds < PROMPT_S, str(result)
    assert without_names(result.stderr).count("[rank 2] rank 1 has died: its process ended without notice") == 1, str(
        result
    )
    assert result.stderr.count("has died") == 1, str(result)


@pytest.mark.parametrize("end", ["1 / 0", *extent([], ["time.sleep(60)"])])
def test_a_rank_that_ends_the_job_has_not_died(end: str) -> None:
    """Nor have those that the launcher then ends."""
    script = f"""
if comm.rank == 1:
    {end}
comm.barrier()
"""
    result = job(4, script, MPITRAIN_DEADLINE_S="1")
    assert result.returncode != 0, str(result)
    assert "has died" not in result.stderr, str(result)


@pytest.mark.rest
def test_a_death_is_noticed_while_a_child_of_that_rank_lives() -> None:
    script = """
if comm.rank == 1:
    if os.fork() == 0:
        time.sleep(3.0)
        os._exit(0)
    os._exit(0)
comm.barrier()
"""
    result = job(2, script)
    assert result.returncode != 0, str(result)
    assert "[rank 0] rank 1 has died" in without_names(result.stderr), str(result)


@pytest.mark.parametrize("end", ["comm.barrier()", *extent([], ["collectives.leave_together()"])])
def test_a_job_that_ends_leaves_no_socket_open(end: str) -> None:
    result = launch(2, "-X", "dev", "-c", HEADER + end, cwd=ROOT)
    assert result.returncode == 0, str(result)
    assert "ResourceWarning" not in result.stderr, str(result)


# in a full run four of the eight, in which each two of the values meet
@pytest.mark.rest
@pytest.mark.parametrize(
    ("operation", "thread", "debug"),
    [
        ("all_reduce(x, async_op=True)", "1", "1"),
        ("irecv(x, 1)", "0", "1"),
        *extent([], [("all_reduce(x, async_op=True)", "0", "0"), ("irecv(x, 1)", "1", "0")]),
    ],
)
def test_an_asynchronous_operation_stands_where_it_was_called(operation: str, thread: str, debug: str) -> None:
    script = f"""
x = {X}
comm.all_reduce(x, async_op=True).wait()
if comm.rank == 0:
    work = comm.{operation}  # line 8
    work.wait()
time.sleep(60)
"""
    env = {"MPITRAIN_DEADLINE_S": "1", "MPITRAIN_PROGRESS_THREAD": thread, "MPITRAIN_DEBUG": debug}
    result = job(2, script, **env)
    assert result.returncode == EXIT_CODE, str(result)
    name = operation.partition("(")[0]
    assert re.search(
        rf"\n\[rank 0\]   rank 0: in .*{name}.*, at <string>:8 in <module>, for ", without_names(result.stderr)
    ), str(result)


def test_an_operation_of_a_group_stands_where_it_was_called() -> None:
    script = f"""
with comm.group():
    comm.all_reduce({X})
    if comm.rank == 0:
        comm.all_gather(np.ones(4), np.ones(2))
    else:
        comm.broadcast(np.ones(4))
"""
    result = job(2, script, MPITRAIN_DEBUG="1")
    assert result.returncode == 1, str(result)
    assert re.search(r"  rank 0: #2 all_gather\(.*  at <string>:8 in <module>", result.stderr), str(result)
    assert re.search(r"  rank 1: #2 broadcast\(.*  at <string>:10 in <module>", result.stderr), str(result)


@pytest.mark.rest
def test_without_threads_in_mpi_the_job_ends_too(tmp_path: Path) -> None:
    script = f"if comm.rank == 1:\n    time.sleep(60)\ncomm.all_reduce({X})\n"
    result = launch(
        2, "-c", "import mpi4py\nmpi4py.rc.thread_level = 'serialized'\n" + HEADER + script, cwd=ROOT, timeout_s=40,
        env={"MPITRAIN_DEADLINE_S": "1", "MPITRAIN_NOTICE_S": "0.2", "MPITRAIN_RECORD_DIR": str(tmp_path)},
    )  # fmt: skip
    assert result.returncode == EXIT_CODE, str(result)
    notice = (
        r"\[rank 0\] notice: rank 0 has waited [01] s; .*\n\[rank 0\]   rank 0: in world .* at <string>:8 in <module>, for .*\n"
        r"\[rank 0\]   => the other ranks "
    )
    assert re.search(notice, result.stderr), str(result)
    assert "[rank 0] flight record of rank 0: the deadline of 1 s has passed" in result.stderr, str(result)
    # rank 1 hears of the end by the sockets of the ring
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank-0.txt", "rank-1.txt"]
    assert "another rank ends the job" in (tmp_path / "rank-1.txt").read_text()


@pytest.mark.rest
def test_only_waits_in_operations_count() -> None:
    """Computing, saving, an operation under way that nobody waits for yet, and waiting at the end for the others: no deadline."""
    script = f"""
collectives.diagnosis.set_deadline(0.5)
work = comm.all_reduce({X}, async_op=True)
try:
    comm.all_reduce({X}, algorithm="magic")
except ValueError:
    pass
time.sleep(1.4)
work.wait()
if comm.rank == 1:
    time.sleep(1.4)
print("done", flush=True)
"""
    result = job(2, script)
    assert result.returncode == 0, str(result)
    assert (result.stdout.count("done"), result.stderr) == (2, ""), str(result)


@pytest.mark.rest
def test_no_deadline_where_it_is_off() -> None:
    result = job(2, "if comm.rank == 1:\n    time.sleep(1)\ncomm.barrier()\nprint('done')\n", MPITRAIN_DEADLINE_S="0")
    assert (result.returncode, result.stdout.count("done"), result.stderr) == (0, 2, ""), str(result)


SIGNALLED = f"""
{{before}}
pids = comm.all_gather_object(os.getpid())
if comm.rank == 1:
    time.sleep(0.5)
    os.kill(pids[0], signal.SIGUSR2)
    time.sleep(1.5)
comm.all_reduce({X})
{{after}}
"""


@pytest.mark.rest
def test_sigusr2_prints_the_record_of_a_rank_that_is_stuck_in_mpi(tmp_path: Path) -> None:
    script = HEADER + SIGNALLED.format(before="", after="os.kill(os.getpid(), signal.SIGUSR1)")
    listening = "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('stop asked for', flush=True))\n"
    result = launch(2, "-c", listening + script, cwd=ROOT, env={"MPITRAIN_RECORD_DIR": str(tmp_path)}, timeout_s=40)
    assert result.returncode == 0, str(result)
    assert result.stderr.count("flight record of rank") == 1, str(result)
    assert "[rank 0] flight record of rank 0: SIGUSR2; " in result.stderr, str(result)
    now = r"\[rank 0\]   now, for (\d\.\d) s: world \(ranks 0, 1\): #2 all_reduce\(4 x float32, op=sum\).*, at <string>:\d+ "
    found = re.search(now, result.stderr)
    assert found, str(result)
    assert float(found[1]) < 1.5, "while it was stuck, not when it came back"
    assert "ended   world (ranks 0, 1): #1 all_gather_object" in (tmp_path / "rank-0.txt").read_text()
    assert result.stdout.count("stop asked for") == 2, "another signal's handler still works"


@pytest.mark.rest
def test_a_program_s_own_handler_of_sigusr2_stays() -> None:
    listening = "import signal\nsignal.signal(signal.SIGUSR2, lambda *_: print('mine', flush=True))\n"
    result = launch(2, "-c", listening + HEADER + SIGNALLED.format(before="", after=""), cwd=ROOT, timeout_s=40)
    assert (result.returncode, result.stdout.count("mine"), result.stderr) == (0, 1, ""), str(result)


ERRORS = {
    "outside": ("fail()", "LookupError: no row 7", []),
    "in a thread": (
        "threading.Timer(0.3, fail).start(); comm.recv(np.ones(1), 0)",
        "LookupError: no row 7",
        list("5678"),
    ),
    "in an operation": ("comm.broadcast_object(Secret(), 1)", "LookupError: no row 7", list("56789")),
    "in an argument": ("comm.all_reduce('x')", "TypeError: x is a builtins.str; expected an array", []),
}


@pytest.mark.rest
@pytest.mark.parametrize("where", extent(["outside", "in a thread"], list(ERRORS)))
def test_the_message_of_an_error_is_the_rank_s_last_text(where: str, tmp_path: Path) -> None:
    """The table of operations comes before, and only if the rank was in one: in the error's thread, or in another one."""
    fails, message, shown = ERRORS[where]
    script = f"""
import threading
def fail():
    raise LookupError("no row 7")
class Secret:
    def __reduce__(self):
        fail()
for _ in range(8):
    comm.barrier()
if comm.rank == 1:
    {fails}
comm.barrier()
"""
    result = job(2, script, MPITRAIN_RECORD_DIR=str(tmp_path))
    assert result.returncode == 1, str(result)
    lines = [line.removeprefix("[rank 1] ") for line in result.stderr.splitlines() if line.startswith("[rank ")]
    assert re.fullmatch(r"rank 1 on \S+ \(process \d+\) ends by an uncaught \w+", lines[0]), str(result)
    assert lines[-1].startswith(message), str(result)
    table = "\n".join(lines[: lines.index("Traceback (most recent call last):")])
    assert re.findall(r"world \(ranks 0, 1\): #(\d) (?:barrier|broadcast_object)", table) == shown, str(result)
    assert (tmp_path / "rank-1.txt").read_text().startswith("flight record of rank 1: ended by ")


@pytest.mark.rest
def test_checked_mode_finds_two_communicators_used_in_different_orders() -> None:
    script = f"""
a, b = comm.split(0), comm.split(0)
start = time.monotonic()
try:
    (a if comm.rank == 0 else b).all_reduce({X})
except ValueError as error:
    assert time.monotonic() - start < 2
    print(f"rank {{comm.rank}}: {{error}}", flush=True)
    time.sleep(0.5)
    raise
"""
    result = job(2, script, MPITRAIN_DEBUG="1")
    assert result.returncode == 1, str(result)
    for rank in range(2):
        assert f"rank {rank}: the ranks wait for each other in different communicators; expected" in result.stdout, str(
            result
        )
    for rank in range(2):
        assert (
            len(re.findall(rf"\n  rank {rank}: group \d \(ranks 0, 1\): #1 all_reduce.* at <string>:8", result.stdout))
            == 2
        )


@pytest.mark.rest
def test_checked_mode_with_a_rank_that_never_comes() -> None:
    script = f"if comm.rank == 1:\n    time.sleep(60)\ncomm.all_reduce({X})\n"
    result = job(2, script, MPITRAIN_DEBUG="1", MPITRAIN_DEADLINE_S="2")
    lines = report(result, "world (ranks 0, 1): #1 all_reduce(4 x float32, op=sum)")
    assert "(comparing calls), at <string>:6" in lines[0], lines
    assert lines[-1] == "  => missing: rank 1 (is in no operation)"


@pytest.mark.rest
@pytest.mark.parametrize("how", ["finalize", "finalize on one rank", "fork"])
def test_programs_that_end_in_their_own_way(how: str) -> None:
    scripts: Mapping[str, str] = {
        "finalize": "from mpi4py import MPI\ncomm.barrier()\nMPI.Finalize()\n",
        "finalize on one rank": "from mpi4py import MPI\ncomm.barrier()\nif comm.rank == 0:\n    MPI.Finalize()\n",
        "fork": """
import multiprocessing
def child():
    time.sleep(0.5)
    sys.exit(5)
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
time.sleep(0.3)
os.kill(process.pid, signal.SIGUSR2)  # as mpirun does to all that a rank has started
process.join()
assert process.exitcode == 5, process.exitcode
comm.barrier()
""",
    }
    result = job(2, scripts[how])
    assert (result.returncode, result.stderr) == (0, ""), str(result)
