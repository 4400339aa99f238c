"""The flight record, and what the ranks' answers mean. All without MPI."""

import math
import re
import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from answers import leave_all, state, waiting

from collectives.diagnosis import (
    dump,
    record,
    set_deadline,
    set_record_folder,
    stacks,
    uncaught,
)
from collectives.diagnosis.hangs import answer, deadline
from collectives.diagnosis.hangs.answer import State, Waiting
from collectives.diagnosis.hangs.deadlock import deadlock_report, deadlocked
from collectives.diagnosis.hangs.hang_report import abandoned, deadline_report, end_report, ranks_to_end
from collectives.diagnosis.record import Log, forget_logs, last_operations, open_operations, shown_ranks


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    leave_all()
    set_record_folder(None)


# The record


def test_operations_carry_numbers_states_and_times() -> None:
    a, b = Log(range(4), "world"), Log([1, 3])
    before = time.monotonic()
    first = a.enter("all_reduce", 1024, "float32", "sum", algorithm="ring")
    second = b.enter("broadcast", 8, "int64", root=1)
    third = b.enter_pair("recv", 1, 7, 3, "float64")
    third.leave()
    second.fail()
    ops = last_operations()[-3:]
    assert [(op.log, op.sequence, op.state) for op in ops] == [(a, 1, "begun"), (b, 1, "failed"), (b, 1, "ended")]
    assert [op.call for op in ops] == [
        "#1 all_reduce(1024 x float32, op=sum)",
        "#1 broadcast(8 x int64, root=1)",
        "recv(3 x float64, peer=1, tag=7)",
    ]
    assert dump.described(ops[0]) == "world (ranks 0-3): #1 all_reduce(1024 x float32, op=sum) by ring"
    assert [op.number for op in open_operations()] == [first.number]
    assert [op.number for op in open_operations(begun_before=math.inf)] == [first.number]
    assert open_operations(begun_before=ops[0].begun) == []
    assert before <= ops[0].begun <= ops[1].begun <= ops[2].ended <= ops[1].ended <= time.monotonic()
    assert ops[0].ended == 0
    assert a.awaited(ops[0]) == (0, 1, 2, 3)
    assert b.awaited(ops[2]) == (3,), "ranks of the job"
    first.leave()
    assert open_operations() == []
    assert b.enter("barrier").operation.sequence == 2, "those between two ranks are not counted"


def test_an_exception_leaves_a_failed_operation() -> None:
    log = Log([0])
    with pytest.raises(LookupError), log.enter("barrier"):
        raise LookupError
    with log.enter("barrier"):
        pass
    entry = log.enter("barrier")
    with pytest.raises(LookupError), entry.failing():
        raise LookupError
    assert [op.state for op in last_operations()[-3:]] == ["failed", "ended", "failed"]
    assert open_operations() == []


def test_an_issued_operation_is_open_only_while_somebody_waits() -> None:
    entry = Log([0]).enter("all_reduce")
    entry.issued()
    assert (open_operations(), last_operations()[-1].state) == ([], "issued")
    waiting_from = time.monotonic()
    entry.wait()
    assert [op.number for op in open_operations()] == [entry.number]
    assert open_operations()[0].begun >= waiting_from
    entry.leave()
    assert last_operations()[-1].state == "ended"


def test_the_ring_keeps_the_newest_and_never_loses_an_open_one() -> None:
    log = Log([0])
    stuck = log.enter("all_reduce")
    for _ in range(record.NUM_SLOTS + 10):
        log.enter("barrier").leave()
    ops = last_operations()
    assert len(ops) == record.NUM_SLOTS
    assert [op.sequence for op in ops] == list(range(12, record.NUM_SLOTS + 12))
    assert [op.number for op in open_operations()] == [stuck.number]


def test_a_trace_keeps_all_operations() -> None:
    """Beyond the ring, with the begin of an issued operation before a thread waited; and none before and after."""
    log = Log([0])
    log.enter("barrier").leave()
    kept = record.keep_all()
    issued = log.enter("all_reduce")
    issued.issued()
    for _ in range(record.NUM_SLOTS + 10):
        log.enter("barrier").leave()
    entered = issued.begun
    issued.wait()
    issued.leave()
    record.keep_last()
    log.enter("barrier").leave()
    assert [entry.sequence for entry in kept] == list(range(2, record.NUM_SLOTS + 13))
    assert (kept[0].entered, kept[0].is_issued, kept[1].is_issued) == (entered, True, False)
    assert kept[0].entered < kept[0].begun <= kept[0].ended
    assert [op.sequence for op in last_operations()][-1] == record.NUM_SLOTS + 13, "the ring goes on"


def test_an_issued_operation_is_open_again_also_where_the_ring_has_overtaken_it() -> None:
    log = Log([0])
    entries = [log.enter_pair("irecv", 0, tag) for tag in range(3)]
    for entry in entries:
        entry.issued()
    for _ in range(3 * record.NUM_SLOTS):
        log.enter("barrier").leave()
    assert open_operations() == []
    for entry in entries:
        entry.wait()
        assert [op.number for op in open_operations()] == [entry.number]
        entry.leave()
    assert len(record._overtaken) <= 1, "those that have ended are forgotten"


def test_ranks_count_what_others_may_wait_for() -> None:
    """Of a group of the ranks 3 and 5, rank 5 sends twice by tag 7: what rank 3 waits for it counts by the same names."""
    log = Log([3, 5])
    log.enter("barrier").leave()
    for name in ("isend", "send"):
        log.enter_pair(name, 0, 7).leave()
    log.enter_pair("recv", 0, 7).leave()
    counts = record.counts()
    third = log.enter_pair("recv", 1, 7).operation, log.enter_pair("irecv", 1, 7).operation
    assert [op.sequence for op in third] == [1, 2], "of this rank's, from that one, by that tag"
    assert counts[log.counter(third[0], 3)] == 2
    assert log.counter(third[0]._replace(op=8), 3) not in counts
    assert counts[log.counter(log.enter_pair("send", 1, 7).operation, 3)] == 1
    assert counts[log.counter(log.enter("barrier").operation, 3)] == 1
    gone = Log([9]).key
    assert gone not in record.counts(), "of a communicator that is no more"


def test_threads_share_the_record() -> None:
    logs = [Log([0], f"thread {i}") for i in range(4)]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda log=log: [log.enter("barrier").leave() for _ in range(2000)]) for log in logs
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    ops = last_operations()
    assert len({op.number for op in ops}) == record.NUM_SLOTS, "no two of them took the same slot"
    late = [op for op in ops if ops[-1].number - op.number >= record.NUM_SLOTS]
    assert len(late) < len(threads), "but for a thread that was held up between its number and its slot"
    assert [log.sequence for log in logs] == [2000] * 4
    assert open_operations() == []


def in_thread(call: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_a_second_thread_inside_a_log_is_refused() -> None:
    log, go, inside = Log([0, 1], "mine"), threading.Event(), threading.Event()

    def operation() -> None:
        with log.enter("barrier"):
            inside.set()
            go.wait()

    # a frame of the package, as of an operation
    thread = threading.Thread(target=stacks.issued_here().carry_out, args=(operation,), daemon=True)
    thread.start()
    inside.wait()
    log.enter_pair("send", 1, 0).leave()  # a message is matched by its tag
    Log([0, 1], "its own").enter("barrier").leave()
    words = r"all_reduce on mine \(ranks 0, 1\), by thread MainThread, while another thread was inside barrier, at .*; expected"
    with pytest.raises(RuntimeError, match=words):
        log.enter("all_reduce")
    assert last_operations()[-1].state == "failed"
    go.set()
    thread.join()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"all_reduce on mine .*; expected one thread at a time"):
            log.enter("all_reduce")  # its order is lost
    assert open_operations() == []


def test_threads_may_take_turns() -> None:
    log = Log([0, 1])
    in_thread(lambda: log.enter("barrier").leave())
    log.enter("barrier").leave()
    issued = log.enter("barrier")
    issued.issued()
    in_thread(lambda: log.enter("barrier").leave())
    last = log.enter("barrier")
    last.issued()
    go, inside = threading.Event(), threading.Event()

    def wait() -> None:
        last.wait()
        inside.set()
        go.wait()

    thread = threading.Thread(target=stacks.issued_here().carry_out, args=(wait,), daemon=True)
    thread.start()
    inside.wait()
    log.enter("barrier").leave()  # beside a thread that waits for what was issued before
    last.leave()
    go.set()
    thread.join()
    in_thread(lambda: log.enter("barrier"))  # left by an exception that nobody has reported
    log.enter("barrier").leave()
    assert open_operations() == []


def test_an_operation_whose_thread_is_elsewhere_is_not_open() -> None:
    # nobody has reported its exception; it must not look as if somebody waited in it for ever
    log, go, ready = Log([0]), threading.Event(), threading.Event()

    def work() -> None:
        log.enter("barrier")
        ready.set()
        go.wait()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    assert open_operations() == []
    assert last_operations()[-1].state == "failed"
    go.set()
    thread.join()


def test_the_nth_communicator_over_the_same_ranks_has_the_same_key_everywhere() -> None:
    keys = [Log([5, 6, 9]).key, Log([5, 6, 9]).key, Log([5, 6]).key]
    assert keys == ["0 of ranks 5, 6, 9", "1 of ranks 5, 6, 9", "0 of ranks 5, 6"]


def test_cost_of_one_call() -> None:
    """Both ends together at most 1 us; 0.45 us were measured. The least of many short runs: other processes share the core."""
    log = Log(range(4))

    def call() -> None:
        log.enter("all_reduce", 1024, "float32", "sum", None, "mpi").leave()

    assert min(timeit.repeat(call, number=100, repeat=500)) / 100 < 1e-6


def test_ranks_in_words() -> None:
    assert shown_ranks([3]) == "rank 3"
    assert shown_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7, 8"
    assert shown_ranks(range(0, 100, 2), limit=3) == "ranks 0, 2, 4, ... (50 in all)"


def test_the_file_holds_all_and_stderr_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log(range(2), "group")
    for _ in range(record.NUM_SLOTS):
        log.enter("barrier").leave()
    begun = time.monotonic()
    log.enter("all_reduce", 4, "float32", "sum")
    set_record_folder(tmp_path / "new")
    dump.dump("asked")
    passed_s = time.monotonic() - begun
    [file] = (tmp_path / "new").iterdir()
    assert file.name == "rank-0.txt"
    lines = file.read_text().splitlines()
    assert lines[0].startswith("flight record of rank 0: asked; ")
    now = r"now, for (\d+\.\d) s: group \(ranks 0, 1\): #257 all_reduce\(4 x float32, op=sum\), at " + re.escape(
        __file__
    )
    assert (found := re.search(now, lines[1])) and float(found[1]) <= round(passed_s, 1)
    assert sum("ended   group (ranks 0, 1): #" in line for line in lines) == record.NUM_SLOTS - 1
    assert any("test_the_file_holds_all" in line for line in lines), "the stacks"
    shown = capsys.readouterr().err.splitlines()
    assert all(line.startswith("[rank 0] ") for line in shown)
    assert sum("ended   group (ranks 0, 1): #" in line for line in shown) == dump.NUM_SHOWN - 1
    assert "begun   group (ranks 0, 1): #257 all_reduce" in shown[-2]


def test_no_time_is_negative() -> None:
    """Also that of an operation which another thread has begun since the clock was read."""
    log = Log(range(2), "group")
    for _ in range(2):
        log.enter("barrier").leave()
    ops = last_operations()[-2:]
    assert [line[:27] for line in dump.table([ops[1]._replace(begun=5.0, ended=5.25)], 5.0)] == [
        "        begun       took  s",
        "    0.0 s ago   250.0 ms  e",
    ]
    for now in (ops[0].begun - 1, ops[0].begun, time.monotonic()):
        assert not any("-0" in line or "-1" in line for line in dump.table(ops, now)[1:])


def test_a_record_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    set_record_folder(tmp_path / "file")
    dump.write_file("asked")
    assert capsys.readouterr().err == (
        f"[rank 0] cannot write the flight record to {tmp_path}/file/rank-0.txt (File exists); "
        "set MPITRAIN_RECORD_DIR to a writable folder\n"
    )


@pytest.mark.parametrize("on_all", [False, True])
def test_the_message_of_an_error_is_the_last_text_also_if_the_record_cannot_be_written(
    on_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    set_record_folder(tmp_path / "file")
    for module, name in ((sys, "excepthook"), (threading, "excepthook")):
        monkeypatch.setattr(module, name, getattr(module, f"__{name}__"))  # as it was in the end
    for name in ("claim", "abort_job", "write_failure"):
        monkeypatch.setattr(uncaught, name, lambda *_: None)
    uncaught.abort_on_uncaught(SimpleNamespace(rank=0, size=2))
    error = ValueError("row 7 has no label")
    error.__dict__.update(_raised_on_all_ranks=on_all, _speaks_for_all=True)
    sys.excepthook(ValueError, error, None)
    *_, first, why, last = capfd.readouterr().err.splitlines()
    assert first == last == "[rank 0] ValueError: row 7 has no label" and "cannot write the flight record" in why


def test_where_a_thread_stands() -> None:
    here = threading.get_ident()
    assert stacks.call_site(here).startswith(f"{__file__}:")
    assert "test_where_a_thread_stands" in stacks.stack(here)
    assert "test_where_a_thread_stands, from " in stacks.standing(here)
    assert stacks.call_site(-1) == "" == stacks.stack(-1)


def test_the_exception_that_a_wait_in_a_finally_hides() -> None:
    here, found = threading.get_ident(), []
    with pytest.raises(ValueError, match="a loss"):  # noqa: PT012
        try:
            raise ValueError("a loss\nof NaN" + "." * 300)
        finally:
            with ThreadPoolExecutor(1) as other:
                found.append(other.submit(stacks.handling, here).result())
    assert found[0].startswith(", while it handles ValueError: a loss of NaN...") and found[0].endswith(" ...")
    assert len(found[0]) < 250 and stacks.handling(here) == "" == stacks.handling(-1)


@pytest.mark.parametrize(
    ("file", "is_library"),
    [
        ("/env/lib/python3.12/site-packages/lightning/fit.py", True),
        ("/usr/lib/python3/dist-packages/trainer.py", True),
        (re.__file__, True),
        (record.__file__, True),
        ("<eval_with_key>.3", True),
        ("/home/user/trainer/fit.py", False),
        ("<string>", False),
    ],
)
def test_a_place_in_a_library_has_the_place_in_the_user_s_files_beside_it(file: str, is_library: bool) -> None:
    """Also for an operation that another thread carries out, and if the library calls itself more often than a report shows."""
    here, library = threading.get_ident(), dict[str, Any](__name__="trainer.fit")
    source = "def fit(then, depth=4):\n    return fit(then, depth - 1) if depth else then()\n"
    exec(compile(source, file, "exec"), library)

    # As if this file's lambdas were of the package, so that the library's frame is the innermost of the program.
    places = eval(
        "lambda: (stacks.call_site(here), str(stacks.issued_here()), stacks.standing(here))",
        {"__name__": "collectives.test", "stacks": stacks, "here": here},
    )
    call_site, issued, standing = library["fit"](places)
    inside, mine = f"{file}:2 in fit", rf"{re.escape(__file__)}:\d+ in test_a_place_in_a_library"
    for place in (call_site, issued):
        assert place.startswith(inside)
        assert bool(re.match(rf"{re.escape(inside)}, from {mine}", place)) is is_library, place
    assert standing.count("in fit") == 2 and bool(re.search(f", from {mine}", standing)) is is_library, standing


def test_what_is_carried_out_later_stands_where_it_was_called() -> None:
    # as if this file were one of the package, called from the lambdas
    def issue() -> stacks.Site:
        return stacks.Site(sys._getframe(1).f_code, sys._getframe(1).f_lineno)

    first, second = [(lambda: issue())() for _ in range(2)]
    here = threading.get_ident()

    def within(site: stacks.Site) -> None:
        assert stacks.call_site(here) == str(site)
        assert stacks.issued_here() is site, "what an operation issues itself was called where it was"

    def nested() -> None:
        within(first)
        for site in (second, first):  # the same one again, too
            site.carry_out(lambda site=site: within(site))
        with pytest.raises(LookupError):
            second.carry_out(lambda: {}[0])
        within(first)

    first.carry_out(nested)
    assert "in nested" not in stacks.call_site(here) and "test_what_is_carried_out_later" in stacks.call_site(here)
    assert stacks._working_for == {}
    inside: list[str] = []
    thread = threading.Thread(
        target=lambda: first.carry_out(lambda: inside.append(stacks.call_site(threading.get_ident())))
    )
    thread.start()
    thread.join()
    assert inside == [str(first)] and f"{__file__}:" in inside[0]


def test_what_a_thread_is_in_has_a_name_and_what_lies_between_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_passed_over", [*stacks._passed_over])
    monkeypatch.setattr(stacks, "_names", {})
    here, library = threading.get_ident(), dict[str, Any](__name__="some_library.inner", answer=None)
    exec("def call(layer, then):\n    return then()\n", library)
    call = library["call"]

    def asked() -> tuple[str, str, str]:
        return stacks.doing(here), str(stacks.issued_here()), stacks.standing(here)

    _, _, standing = call("a", asked)
    assert standing.split(", from ")[1:] and "in call" in standing.split(", from ")[2], "it is one as any other"
    assert stacks.doing(here) == ""
    stacks.name(call, lambda local: f"the forward of {local['layer']}")
    stacks.pass_over("some_library")
    doing, site, standing = call("a", lambda: call("b", asked))
    assert doing == "the forward of b", "the innermost"
    assert "in call" not in site and "in call" not in standing

    def work() -> None:
        done.append(stacks.doing(threading.get_ident()))
        stacks.issued_here().carry_out(lambda: done.append(stacks.doing(threading.get_ident())))

    def wait_for_it() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    done: list[str] = []
    monkeypatch.setattr(stacks, "inside_package", lambda thread: True)
    call("d", wait_for_it)
    assert done == ["", "the forward of d"], "of a thread that works for the main one, which waits"
    stacks.name(asked, lambda local: local["no such variable"])
    assert call("c", asked)[0] == "the forward of c"


def test_a_daemon_of_the_user_s_may_wait_for_ever() -> None:
    go = threading.Event()

    for name, daemon, dispensable in (
        ("any", True, True),
        ("any", False, False),
        ("collectives-progress", True, False),
    ):
        thread = threading.Thread(target=go.wait, name=name, daemon=daemon)
        thread.start()
        assert answer._ends_with_main(thread.ident or 0) is dispensable
        go.set()
        thread.join()
        go.clear()
    assert not answer._ends_with_main(threading.get_ident())


# The deadline's settings


def test_deadline_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, expected in (("", 600.0), ("0", 0.0), ("2.5", 2.5)):
        monkeypatch.setenv("MPITRAIN_DEADLINE_S", said)
        assert deadline.from_environment() == expected
    for said in ("soon", "-1", "nan", "inf"):
        monkeypatch.setenv("MPITRAIN_DEADLINE_S", said)
        with pytest.raises(ValueError, match=f"MPITRAIN_DEADLINE_S is '{said}'; expected seconds of at least 0"):
            deadline.from_environment()
    monkeypatch.setattr(deadline.Deadline, "seconds", 1.0)
    for wrong in (-1, float("nan"), "600"):
        with pytest.raises(ValueError, match=f"deadline {wrong!r}; expected seconds of at least 0"):
            set_deadline(wrong)  # type: ignore[arg-type]
    monkeypatch.setattr(deadline.Deadline, "seconds", None)
    with pytest.raises(RuntimeError, match=r"call collectives\.world\(\) first"):
        set_deadline(1)


# What the answers mean


def test_the_report_names_every_kind_of_missing_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPITRAIN_DEBUG", raising=False)
    everyone = range(8)
    late = waiting(ranks=everyone)
    states = [
        state(late),
        state(waiting(ranks=everyone)),
        state(last={"A": "#4 barrier (ended)"}),
        None,
        state(ended="sys.exit(0)"),
        state(waiting("B", 2, ranks=(5, 6))),
        state(waiting(name="broadcast", ranks=everyone)),
        state(waiting(sequence=4, ranks=everyone)),
    ]
    text = deadline_report(0, late, states, 2.0)
    assert text.splitlines() == [
        "rank 0 has waited 3.0 s in A (ranks 0-7): #5 all_reduce; the deadline is 2 s (MPITRAIN_DEADLINE_S). The job ends.",
        "  ranks 0, 1: in A (ranks 0-7): #5 all_reduce, at a.py:3 in f, for 3.0 s",
        "  rank 2: in no operation, main thread at b.py:4 in g; its last operation there: #4 barrier (ended)",
        "  rank 3: no answer yet",
        "  rank 4: in no operation, its program has ended: sys.exit(0)",
        "  rank 5: in B (ranks 5, 6): #2 all_reduce, at a.py:3 in f, for 3.0 s",
        "  rank 6: in A (ranks 0-7): #5 broadcast, at a.py:3 in f, for 3.0 s",
        "  rank 7: in A (ranks 0-7): #4 all_reduce, at a.py:3 in f, for 3.0 s",
        "  => missing: rank 2 (is in no operation); rank 3 (gives no answer yet); rank 4 (has ended); "
        "rank 5 (is in an operation of another communicator); "
        "ranks 6, 7 (are in a different operation of the same communicator)",
        "  => MPITRAIN_DEBUG=1 finds the first call that differs between the ranks",
    ]
    monkeypatch.setenv("MPITRAIN_DEBUG", "1")
    assert deadline_report(0, late, states, 2.0).splitlines() == text.splitlines()[:-1], "it is on"


def test_nobody_is_missing_where_all_are_in_the_operation() -> None:
    late = waiting()
    assert "=> no rank is missing" in deadline_report(1, late, [state(late), state(late), None], 1.0), (
        "rank 2 is no part of it"
    )


ALL = range(4)
IN_A, IDLE = state(waiting(ranks=ALL)), state(counts={"A": 4})


@pytest.mark.parametrize(
    ("others", "to_end"),
    [
        pytest.param([IN_A, IN_A, IN_A], [], id="no rank is missing"),
        pytest.param([IN_A, IDLE, IN_A], [2], id="a rank is in no operation"),
        pytest.param([IDLE, None, IN_A], [1, 2], id="two ranks, of which one is silent"),
        pytest.param([state(waiting("B", 2, ranks=(1, 2))), IDLE, IN_A], [2], id="a chain over two communicators"),
        pytest.param(
            [state(waiting("B", 2, ranks=(1, 2))), state(waiting("C", 3, ranks=(2, 3))), None], [3], id="a longer chain"
        ),
        pytest.param([IN_A, state(waiting(name="barrier", ranks=ALL)), IN_A], [2], id="a skipped collective"),
        pytest.param([IN_A, state(waiting(sequence=6, ranks=ALL)), IN_A], [2], id="the rank that skipped one is ahead"),
        pytest.param(
            [IN_A, state(waiting(sequence=6, ranks=ALL)), state(waiting(sequence=6, ranks=ALL))], [2, 3], id="a tie"
        ),
        pytest.param(
            [IN_A, *[state(waiting(name="barrier", ranks=ALL))] * 2], [2, 3], id="a tie of ranks with equal numbers"
        ),
        pytest.param(
            [state(counts={"A": 5}), state(counts={"A": 5}), IDLE], [3], id="ranks that have done their part compute"
        ),
        pytest.param(
            [state(waiting("B", 2, ranks=(1, 3))), state(counts={"A": 5}), None],
            [3],
            id="a done rank, and a silent one",
        ),
    ],
)
def test_which_ranks_end_so_that_the_others_go_on(others: list[State | None], to_end: list[int]) -> None:
    late = waiting(ranks=ALL)
    assert ranks_to_end(late, [state(late), *others]) == to_end


def test_the_few_ranks_in_another_operation_are_missing_also_if_one_of_them_reports() -> None:
    mine, others = waiting(name="broadcast", ranks=ALL), [IN_A, IN_A, IN_A]
    report = deadline_report(0, mine, [state(mine), *others], 3.0)
    assert "=> missing: rank 0 (is in a different operation of the same communicator)" in report
    mine = waiting(name="broadcast", ranks=(0, 1))
    two = [state(mine), state(waiting(ranks=(0, 1)))]
    assert "=> missing: rank 1 (is in a different" in deadline_report(0, mine, two, 3.0), "of two ranks nobody knows"


@pytest.mark.parametrize(
    ("other", "stuck"),
    [
        pytest.param(state(ended="sys.exit(0)", counts={"A": 4}), [0, 1], id="never came"),
        pytest.param(state(ended="sys.exit(0)", counts={"A": 5}), [], id="has done its part"),
        pytest.param(state(ended="sys.exit(0)"), [], id="has freed the communicator"),
        pytest.param(state(counts={"A": 4}), [], id="still runs"),
        pytest.param(None, [], id="gives no answer yet"),
    ],
)
def test_who_waits_for_a_rank_that_has_ended(other: State | None, stuck: list[int]) -> None:
    everyone = range(3)
    states = [state(waiting(ranks=everyone)), state(waiting("B", 2), waiting(ranks=everyone)), other]
    assert list(abandoned(states)) == stuck
    assert abandoned([state(waiting(ranks=everyone), ended="sys.exit(0)"), None, other]) == {}, (
        "its program has ended, too"
    )
    assert abandoned([state(waiting(ranks=everyone, dispensable=True)), None, other]) == {}


def test_messages_are_counted_one_by_one() -> None:
    receives = state(waiting(sequence=3, ranks=[1], counter="A: send, 0, 7", name="recv"))
    for sent, stuck in ((2, [0]), (3, [])):
        assert list(abandoned([receives, state(ended="sys.exit(0)", counts={"A": 9, "A: send, 0, 7": sent})])) == stuck
    assert list(abandoned([receives, state(ended="sys.exit(0)", counts={"A": 9})])) == [0], "none was sent"


def test_the_report_of_an_end_names_who_how_and_for_whom_others_wait() -> None:
    everyone = range(4)
    states = [
        state(waiting(ranks=everyone)),
        state(ended="the script returned", counts={"A": 4}, last={"A": "#4 barrier (ended)"}),
        state(waiting("B", 2, ranks=(0, 2))),
        state(waiting(ranks=everyone)),
    ]
    text = end_report(abandoned(states), states)
    assert text.splitlines() == [
        "rank 1 has ended, and ranks 0, 3 wait for it in A (ranks 0-3): #5 all_reduce. The job ends.",
        "  ranks 0, 3: in A (ranks 0-3): #5 all_reduce, at a.py:3 in f, for 3.0 s",
        "  rank 1: in no operation, its program has ended: the script returned; its last operation there: #4 barrier (ended)",
        "  rank 2: in B (ranks 0, 2): #2 all_reduce, at a.py:3 in f, for 3.0 s",
        "  => missing: rank 1 (has ended); rank 2 (is in an operation of another communicator)",
        "  => MPITRAIN_DEBUG=1 finds the first call that differs between the ranks",
        "  => a rank must not end before the last operation in which it takes part",
    ]


def comparing(key: str, sequence: int = 5, **more: Any) -> Waiting:
    return waiting(key, sequence, comparing=True, **more)


@pytest.mark.parametrize(
    ("states", "stuck"),
    [
        pytest.param({0: state(comparing("A")), 1: state(comparing("B"))}, [0, 1], id="two orders"),
        pytest.param({0: state(comparing("A")), 1: state()}, [], id="one is late"),
        pytest.param({0: state(comparing("A")), 1: state(comparing("A"))}, [], id="the same"),
        pytest.param({0: state(comparing("A")), 1: state(waiting("B"))}, [], id="the other moves data"),
        pytest.param(
            {0: state(comparing("A"), counts={"B": 5}), 1: state(comparing("B"))}, [], id="the other is about to go on"
        ),
        pytest.param(
            {0: state(comparing("A")), 1: state(comparing("B"), serving={"A": 9})}, [], id="another thread will come"
        ),
        pytest.param(
            {
                0: state(comparing("A", ranks=(0, 1))),
                1: state(comparing("B", ranks=(1, 2))),
                2: state(comparing("C", ranks=(2, 0))),
                3: state(comparing("D", ranks=(2, 3))),
                4: state(comparing("E", ranks=(4, 5))),
                5: state(),
            },
            [0, 1, 2, 3],
            id="a circle of three, one that waits for it, and one that waits for a slow rank",
        ),
    ],
)
def test_who_can_never_go_on(states: dict[int, State], stuck: list[int]) -> None:
    assert list(deadlocked(states)) == stuck


def test_the_deadlock_names_both_orders() -> None:
    text = deadlock_report({1: comparing("B"), 0: comparing("A")})
    assert text.splitlines()[1:] == [
        "  rank 0: A (ranks 0, 1): #5 all_reduce  at a.py:3 in f",
        "  rank 1: B (ranks 0, 1): #5 all_reduce  at a.py:3 in f",
    ]


def test_operations_that_a_loss_has_interrupted_are_over() -> None:
    log = Log([0, 1], "before")
    entry, issued = log.enter("barrier"), log.enter("all_reduce")
    issued.issued()
    assert entry.number in [each.number for each in open_operations()]
    forget_logs()
    assert not {entry.number, issued.number} & {each.number for each in open_operations()}
    assert {each.state for each in last_operations() if each.number in (entry.number, issued.number)} == {"failed"}
