"""The parts of a trace that need neither torch nor MPI: clocks, waits and arrows, nesting, the file, and requests."""

import gzip
import json
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from trace_checks import check

from mpitrain.job.record.files.folder_lock import FolderLock
from mpitrain.job.record.trace import packing, request
from mpitrain.job.record.trace.clocks import Line, Sample, fit
from mpitrain.job.record.trace.events import COMMUNICATION, RankEvents, Slice, nested
from mpitrain.job.record.trace.meetings import FREES, WAITS, Meetings, Met, corrections, role
from mpitrain.view.trace import drawn, trace_command
from mpitrain.view.trace.picture import draw, joined

# Clocks


def test_the_line_is_within_half_the_shortest_round_trip() -> None:
    """A clock that is 1 s ahead and drifts by 50 ppm over 10 minutes; a round trip in ten is a hundred times as long, on one way."""
    rng = np.random.default_rng(0)
    at = np.sort(rng.uniform(20_000, 20_600, 600))
    error = rng.uniform(20e-6, 60e-6, 600) * np.where(rng.random(600) < 0.1, 100, 1)
    lies = error * np.where(error > 1e-3, 1, rng.uniform(-1, 1, 600))
    line = fit([Sample(*each) for each in zip(at, 1 + 50e-6 * (at - 20_000) + lies, error, strict=True)])
    assert line.error == error.min()
    times = np.linspace(20_000, 20_600, 100)
    assert np.abs(line(times) - (times + 1 + 50e-6 * (times - 20_000))).max() < error.min()


def test_few_samples() -> None:
    assert fit([]) == Line()  # the same clock
    assert fit([])(3.0) == 3.0
    assert (
        fit([Sample(5.0, 2.0, 1e-3), Sample(5.0, 2.5, 1e-4)])(6.0) == 8.5
    )  # no rate from one moment: the better sample
    assert fit([Sample(10.0, 1.0, 1e-5), Sample(20.0, 2.0, 1e-5)])(15.0) == pytest.approx(16.5)


# Waits and arrows

BOTH = FREES | WAITS


def meeting(*rows: tuple[int, int, float, float]) -> Meetings:
    """From (key, role, begun, ended)."""
    return Meetings.of([(key, role, begun, begun, ended) for key, role, begun, ended in rows])


def test_each_rank_waits_for_the_last_one() -> None:
    ranks = [
        meeting((1, BOTH, 0.0, 5.1), (7, FREES, 6.0, 6.1)),
        meeting((1, BOTH, 5.0, 5.1)),
        meeting((1, BOTH, 3.0, 5.2), (7, WAITS, 5.5, 6.3), (9, BOTH, 8.0, 9.0)),
    ]
    met = Met(ranks)
    assert [last.rank.tolist() for last in met.last] == [[1, -1], [2], [1, 0, -1]]
    np.testing.assert_allclose(np.concatenate(met.waited), [5.0, 0, 0, 2.0, 0.5, 0])
    # the last rank waits for nobody; a message has an arrow, a number that one rank alone has none
    assert [has.tolist() for has in met.has_arrow] == [[True, False], [False], [True, True, False]]
    assert [role("broadcast", elements=3, is_root=is_root) for is_root in (True, False)] == [FREES, WAITS]
    assert [role("reduce", elements=3, is_root=is_root) for is_root in (True, False)] == [WAITS, FREES]
    assert role("all_reduce", elements=0, is_root=False) == role("split", elements=0, is_root=False) == 0


@example([(1, 2, 0.0, 0.0001), (2, 0, 0.0, 0.00390625)])  # soon after each other
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.floats(0, 1), st.floats(1e-4, 1)), max_size=20))
def test_no_arrow_points_back_in_time(messages: list[tuple[int, int, float, float]]) -> None:
    """Messages between three hosts, on clocks that are off by up to 5 ms and drift by 1000 ppm. They take 0.1 ms and more."""
    off = [Line(), Line(0.0, 0.005, 1e-3), Line(0.5, -0.003, -1e-3)]
    rows: list[list[tuple[int, int, float, float]]] = [[], [], []]
    for number, (sender, receiver, sent, takes) in enumerate(messages):
        rows[sender].append((number, FREES, off[sender](sent), off[sender](sent + 1e-5)))
        if receiver != sender:
            rows[receiver].append((number, WAITS, off[receiver](sent), off[receiver](sent + takes)))
    ranks = [meeting(*of_rank) for of_rank in rows]
    fixes = corrections(ranks, [0, 1, 2])
    assert fixes[0](7.0) == 7.0, "the times are those of rank 0"
    met = Met([each.moved(fix) for each, fix in zip(ranks, fixes, strict=True)])
    assert met.num_back_in_time == 0
    assert all(fix(7.0) == 7.0 for fix in corrections(ranks, [0, 0, 0])), "ranks of one host have one clock"


@pytest.mark.parametrize("num_hosts", [3, 64])
def test_a_sender_to_many_hosts_moves_no_further_than_for_the_latest(num_hosts: int) -> None:
    """Host 1, whose clock is 20 us ahead, sends to all others, in 5 us."""
    times = [0.01 * number for number in range(20)]
    rows: list[list[tuple[int, int, float, float]]] = [[] for _ in range(num_hosts)]
    for number, sent in enumerate(times):
        rows[1].append((number, FREES, sent + 2e-5, sent + 2.1e-5))
        for host in (host for host in range(num_hosts) if host != 1):
            rows[host].append((number, WAITS, sent, sent + 5e-6))
    fixes = corrections([meeting(*of_rank) for of_rank in rows], list(range(num_hosts)))
    assert max(abs(fix(time) - time) for fix in fixes for time in times) < 4e-5


# The events and the file


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), max_size=12))
def test_slices_nest(spans: list[tuple[int, int]]) -> None:
    slices = nested([Slice("s", "c", begun, begun + length) for begun, length in spans])
    assert sorted(each.begun for each in slices) == sorted(begun for begun, _ in spans)
    part = RankEvents(0, "host", 0.0)
    for begun, length in spans:
        part.slice(COMMUNICATION, "s", "c", begun * 1e-6, (begun + length) * 1e-6)
    check(json.loads(f"[{part.text()}]"))


@given(st.lists(st.text(max_size=300), min_size=1, max_size=5))
def test_joined_parts_are_one_gzip_member(texts: list[str]) -> None:
    data = b"".join(packing.joined(packing.pack(text) for text in texts))
    assert gzip.decompress(data).decode() == "".join(texts)
    unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)
    assert unpacker.decompress(data).decode() == "".join(texts)
    assert unpacker.eof, "a reader of the first member alone has it all, with the right checksum"
    assert not unpacker.unused_data


def written(file: Path) -> None:
    """A trace of two ranks, in which rank 0 waits for rank 1."""
    parts = [RankEvents(rank, "host", 100.0) for rank in range(2)]
    for rank, part in reversed(list(enumerate(parts))):
        part.slice("steps", "step 7", "step", 100.0, 100.01)
        part.slice("steps", "data", "phase", 100.0, 100.001)
        part.slice("layers", "forward blocks.0", "layer", 100.001, 100.004 + 0.002 * rank)
        part.slice("layers", "backward blocks.0", "layer", 100.004 + 0.002 * rank, 100.0065)
        reduction = part.slice("communication", "all_reduce", "communication", 100.004 + 0.002 * rank, 100.0065)
        if rank == 1:
            reduction.arrows_out.append(3)
        part.in_flight("isend", 100.0, 100.002)
    parts[0].slice("communication", "wait for rank 1", "wait", 100.004, 100.006)
    parts[0].slice("communication", "transfer", "communication", 100.0061, 100.0065).arrows_in.append(3)
    text = packing.begin_of_file({"clock_error_us": 0}) + packing.BETWEEN.join(part.text() for part in parts)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"".join(packing.joined([packing.pack(text), packing.pack(packing.END_OF_FILE)])))


def test_the_picture_shows_each_rank(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written(tmp_path / "traces/step-00000007.json.gz")
    check(packing.read_trace(tmp_path / "traces/step-00000007.json.gz")["traceEvents"])
    assert trace_command.main([str(tmp_path), "--draw", str(tmp_path / "trace.svg")]) == 0
    svg = (tmp_path / "trace.svg").read_text()
    assert all(
        f"<!-- {text} -->" in svg for text in ("rank 0 on host", "rank 1 on host", "step 7", "wait for another rank")
    )
    (tmp_path / "broken.json.gz").write_bytes((tmp_path / "traces/step-00000007.json.gz").read_bytes()[:200])
    with pytest.raises(OSError, match=r"broken\.json\.gz cannot be read: it is cut off"):
        draw(tmp_path / "broken.json.gz", tmp_path / "broken.svg")


def many_ranks(file: Path, num: int, num_slices: int) -> None:
    """A trace of so many ranks, each with a step and short slices."""
    texts = []
    for rank in range(num):
        part = RankEvents(rank, "host", 0.0)
        part.slice("steps", f"step {rank}", "step", 0.0, 1e-6 * num_slices)
        for number in range(num_slices):
            part.slice("layers", f"forward {number}", "layer", 1e-6 * number, 1e-6 * number + 5e-7)
        texts.append(part.text())
    text = packing.begin_of_file({"ranks": num}) + packing.BETWEEN.join(texts) + packing.END_OF_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(text.encode(), 1))


@pytest.mark.rest
def test_the_picture_of_many_ranks_has_the_first_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts the events of these alone."""
    file, svg = tmp_path / "traces/step-00000001.json.gz", tmp_path / "x.svg"
    pytest.importorskip("matplotlib")
    many_ranks(file, 40, 100)
    monkeypatch.setattr(drawn, "_MAX_EVENTS", 32 * 110)
    draw(file, svg)
    text = svg.read_text()
    assert "the first 32 of 40 ranks" in text and "rank 31 on host" in text and "rank 32 on host" not in text
    assert "<!-- step 0 -->" in text and "<!-- step 1 -->" not in text
    monkeypatch.setattr(drawn, "_MAX_EVENTS", 32 * 90)
    with pytest.raises(ValueError, match="expected at most 2,880 events of the ranks to draw"):
        draw(file, svg)


def test_bars_nearer_than_a_pixel_are_one() -> None:
    bars = np.array([[5.0, 1.0], [0.0, 1.0], [1.5, 1.0], [1.6, 0.1], [9.0, -1.0]])
    assert joined(bars, 0.0).tolist() == [[0.0, 1.0], [1.5, 2.5], [5.0, 6.0], [9.0, 9.0]]
    assert joined(bars, 0.6).tolist() == [[0.0, 2.5], [5.0, 6.0], [9.0, 9.0]]
    assert joined(bars[:1], 9.0).tolist() == [[5.0, 6.0]]


# Requests


@contextmanager
def answering(run: Path, act: str) -> Iterator[None]:
    """Rank 0 of a run, which sees a request, and then does `act`."""

    def serve() -> None:
        requests = request.TraceRequests(run)
        while not requests.look():
            time.sleep(0.01)
            requests._looked_at = -1e9  # a real run looks once a second
        requests.answer("taken")
        if act == "ends":
            lock.release()
        else:
            requests.answer(
                "done", path="traces/step-00000004.json.gz", problem="the disk is full" if act == "fails" else ""
            )
        assert not requests.look(), "a request is served once"

    lock = FolderLock(run)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join(10)
        lock.release()


@pytest.mark.rest
@pytest.mark.parametrize(
    ("act", "expected"),
    [("traces", ""), ("fails", "the disk is full"), ("ends", "the run ended before the end of the trace")],
)
def test_a_request_has_one_answer(tmp_path: Path, act: str, expected: str) -> None:
    with answering(tmp_path, act):
        if expected:
            with pytest.raises(RuntimeError, match=expected):
                trace_command.traced(tmp_path, 2, timeout_s=20)
        else:
            assert trace_command.traced(tmp_path, 2, timeout_s=20) == tmp_path / "traces/step-00000004.json.gz"
    assert not (tmp_path / request.NAME).exists()


def test_a_request_says_why_there_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no job trains in"):
        trace_command.traced(tmp_path, 2, timeout_s=1)
    with pytest.raises(ValueError, match="has no trace"):
        trace_command.main([str(tmp_path), "--draw", "x.svg"])
    lock = FolderLock(tmp_path)
    try:
        with pytest.raises(RuntimeError, match=r"has not begun to trace within 0\.3 s"):
            trace_command.traced(tmp_path, 2, timeout_s=0.3)
        request.ask(tmp_path, 3, timeout_s=60)
        with pytest.raises(ValueError, match="asked for already"):
            trace_command.traced(tmp_path, 2, timeout_s=5)
    finally:
        lock.release()


def test_a_request_is_void_when_its_time_is_over(tmp_path: Path) -> None:
    """The request of a command that was killed, and a later run, and another command."""
    request.ask(tmp_path, 2, timeout_s=0.01)
    time.sleep(0.02)
    assert request.TraceRequests(tmp_path).look() == 0
    with answering(tmp_path, "traces"):
        assert trace_command.traced(tmp_path, 2, timeout_s=20).name == "step-00000004.json.gz"


def test_the_command_imports_neither_torch_nor_mpi() -> None:
    code = "import sys; from mpitrain.view.trace import picture, trace_command; print({'torch', 'mpi4py.MPI'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "set()\n"
