"""Prices of schedules against closed forms, and `python -m collectives cost` with its table, its figures and its picture."""

import json
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from collectives import cli
from collectives.schedules import BUILDERS, build
from collectives.schedules.cost import SEGMENTS, Network, Price, prices, seconds
from collectives.schedules.trace import trace

ALPHA, BANDWIDTH = 5e-6, 25e9
SIZES = np.array([1.0, 1e4, 1e6, 1e9])
FLAT = Network(alpha=ALPHA, bandwidth=BANDWIDTH)


def walked(operation: str, algorithm: str, size: int, network: Network = FLAT, **setup: int) -> np.ndarray:
    return seconds(trace(build(operation, algorithm, size, **setup)), network, SIZES)


@pytest.mark.parametrize(
    ("operation", "algorithm", "size"),
    [
        ("all_reduce", "ring", 13),
        ("all_reduce", "halving_doubling", 64),
        ("all_reduce", "halving_doubling", 37),
        ("all_reduce", "recursive_doubling", 32),
        ("all_reduce", "tree", 32),
        ("all_gather", "ring", 9),
        ("all_gather", "bruck", 23),
        ("all_gather", "recursive_doubling", 32),
        ("reduce_scatter", "ring", 9),
        ("reduce_scatter", "halving", 23),
        ("broadcast", "tree", 21),
        ("broadcast", "scatter_all_gather", 16),
        ("scatter", "tree", 32),
        ("scatter", "linear", 9),
        ("all_to_all", "pairwise", 11),
    ],
)
def test_where_the_busiest_rank_never_waits(operation: str, algorithm: str, size: int) -> None:
    """Time is then alpha a round and beta for all it sends; for a tree's all-reduce, half of its 2 log2 N buffers are received."""
    cost = build(operation, algorithm, size).cost
    traffic = 2 * cost.traffic if (operation, algorithm) == ("all_reduce", "tree") else cost.traffic
    expected = cost.rounds * ALPHA + float(traffic) * SIZES / BANDWIDTH
    assert walked(operation, algorithm, size) == pytest.approx(expected)


@pytest.mark.parametrize("num_segments", [1, 3, 32])
@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "reduce"])
def test_a_pipeline_takes_a_piece_a_round(operation: str, num_segments: int) -> None:
    rounds = build(operation, "double_tree", 29, num_segments=num_segments).cost.rounds
    expected = rounds * (ALPHA + SIZES / (2 * num_segments) / BANDWIDTH)
    assert walked(operation, "double_tree", 29, num_segments=num_segments) == pytest.approx(expected)


def test_two_levels() -> None:
    g, n = 8, 4
    network = Network(g, ALPHA, BANDWIDTH, 1e-6, 200e9)
    within = 2 * (3 * 1e-6 + (g - 1) / g * SIZES / 200e9)
    across = 2 * (2 * ALPHA + (n - 1) / n * SIZES / g / BANDWIDTH)
    assert walked("all_reduce", "two_level", g * n, network, per_node=g) == pytest.approx(within + across)


@pytest.mark.parametrize(("links", "slower"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_ranks_share_the_links_of_their_node(links: int, slower: int) -> None:
    g, n = 8, 4
    network = Network(g, ALPHA, BANDWIDTH, 0.0, 1e30, links)
    across = 2 * (2 * ALPHA + (n - 1) / n * SIZES / g / BANDWIDTH * slower)
    assert walked("all_reduce", "two_level", g * n, network, per_node=g) == pytest.approx(across)
    # a ring crosses each node's edge once in every round, and needs but one link
    alone = Network(g, ALPHA, BANDWIDTH, 0.0, 1e30)
    assert walked("all_reduce", "ring", g * n, network) == pytest.approx(walked("all_reduce", "ring", g * n, alone))


def test_a_node_alone_has_no_network() -> None:
    inside = Network(16, 1.0, 1.0, ALPHA, BANDWIDTH)
    assert walked("all_reduce", "ring", 16, inside) == pytest.approx(walked("all_reduce", "ring", 16))


@pytest.mark.parametrize(
    ("operation", "algorithm", "size", "per_node"),
    [
        ("all_reduce", "ring", 24, 4),
        ("all_reduce", "halving_doubling", 24, 4),
        ("all_gather", "two_level", 24, 4),
        ("reduce_scatter", "two_level", 30, 3),
        ("all_to_all", "pairwise", 24, 8),
    ],
)
@pytest.mark.parametrize("links", [None, 1])
def test_one_node_stands_for_all(operation: str, algorithm: str, size: int, per_node: int, links: int | None) -> None:
    network = Network(per_node, ALPHA, BANDWIDTH, 1e-6, 100e9, links)
    schedule = build(operation, algorithm, size, per_node=per_node)
    assert schedule.period
    one = trace(schedule, per_node)
    assert one.num_ranks == per_node and one.num_rounds == schedule.cost.rounds
    assert seconds(one, network, SIZES) == pytest.approx(walked(operation, algorithm, size, network, per_node=per_node))


@pytest.mark.rest
def test_prices_choose_the_best_number_of_segments() -> None:
    network = Network(8, ALPHA, BANDWIDTH, 2e-6, 200e9)
    sizes = [1 << 10, 1 << 22, 1 << 28]
    found = {
        price.nbytes: price for price in prices("all_reduce", 48, network, sizes) if price.algorithm == "double_tree"
    }
    for nbytes in sizes:
        best: dict[int, float] = {}
        for k in (1, 2, 4, 8, 16, 32, 64, 128):
            run = trace(build("all_reduce", "double_tree", 48, num_segments=k))
            best[k] = float(seconds(run, network, np.array([float(nbytes)]))[0])
        k = min(best, key=lambda k: best[k])
        assert (found[nbytes].num_segments, found[nbytes].seconds) == (k, pytest.approx(best[k]))
    assert [found[nbytes].num_segments for nbytes in sizes] == sorted(found[nbytes].num_segments for nbytes in sizes)
    assert found[sizes[0]].num_segments == 1 < found[sizes[2]].num_segments < SEGMENTS[-1]


def test_every_algorithm_has_a_price() -> None:
    for operation, algorithms in BUILDERS.items():
        found = prices(operation, 24, Network(4), [1 << 20])
        assert [price.algorithm for price in found] == list(algorithms)
        assert all(1e-6 < price.seconds < 1 for price in found), found
    assert "two_level" not in {price.algorithm for price in prices("all_reduce", 24, Network(1), [1])}
    assert {price.seconds for price in prices("all_reduce", 1, Network(1), [1 << 20])} == {0.0}
    with pytest.raises(ValueError, match="10 ranks with 8 on each node; expected a multiple of 8 ranks"):
        prices("all_reduce", 10, Network(8), [1])


@pytest.mark.rest
def test_thousands_of_ranks_in_seconds() -> None:
    network = Network(8, ALPHA, BANDWIDTH)
    start = time.perf_counter()
    found = {price.algorithm: price for price in prices("all_gather", 4096, network, [1 << 30])}
    assert time.perf_counter() - start < 60, "on a busy machine; a walk over all ranks of the ring would take minutes"
    assert found["ring"].seconds == pytest.approx(4095 * (ALPHA + (1 << 30) / 4096 / BANDWIDTH), rel=0.01)
    assert found["two_level"].seconds < found["bruck"].seconds < found["ring"].seconds


# The command line


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["cost", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.rest
def test_table_json_and_picture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    image = pytest.importorskip("matplotlib.image")
    monkeypatch.setenv("COLUMNS", "100")
    file, picture = tmp_path / "prices.json", tmp_path / "prices.png"
    shown = run(
        capsys,
        *("--ranks", "64", "--alpha", "5us", "--beta", "25GB/s", "--gpus-per-node", "8"),
        *("--node-alpha", "1us", "--node-beta", "100GB/s", "--links-per-node", "4", "--sizes", "1KiB,1MiB,1GiB"),
        *("--json", str(file), "--plot", str(picture)),
    )
    assert "all_reduce, 64 ranks, 8 a node" in shown
    assert "between nodes 5 µs and 25 GB/s a message, 4 at a time; within a node 1 µs and 100 GB/s" in shown

    figures = json.loads(file.read_text())
    assert (figures["operation"], figures["ranks"]) == ("all_reduce", 64)
    assert figures["network"] == {
        "per_node": 8,
        "alpha": 5e-6,
        "bandwidth": 25e9,
        "node_alpha": 1e-6,
        "node_bandwidth": 100e9,
        "links_per_node": 4,
    }
    expected = prices("all_reduce", 64, Network(**figures["network"]), [1 << 10, 1 << 20, 1 << 30])
    assert [Price(**price) for price in figures["results"]] == expected

    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = image.imread(picture)
    assert pixels.shape[0] > 500 and pixels.shape[1] > 800
    colours = {tuple(colour) for colour in np.round(pixels[::2, ::2, :3].reshape(-1, 3) * 255).astype(int).tolist()}
    first_colours = {(31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40), (148, 103, 189), (140, 86, 75)}
    assert first_colours <= colours, "a line for each of six algorithms"


def test_the_fastest_is_bold(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("MPITRAIN_TTY", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = run(capsys, "--ranks", "16", "--op", "all_gather", "--sizes", "1KiB")
    row = next(line for line in shown.splitlines() if "1 KiB" in line)
    # 4 rounds of 5 us, and 15/16 KiB: the doubling algorithms; the ring needs 15 rounds
    assert re.findall(r"\x1b\[1m *([^\x1b]+)", row) == ["20 µs", "20 µs"], row


@pytest.mark.parametrize("operation", list(BUILDERS))
def test_every_operation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(capsys, "--ranks", "24", "--gpus-per-node", "4", "--op", operation)
    assert f"{operation}, 24 ranks, 4 a node" in shown
    rows = [line for line in shown.splitlines() if "iB  " in line]
    assert len(rows) == 11, "1 KiB to 1 GiB in steps of 4"
    assert "…" not in shown, "nothing is cut off at 80 columns"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "the following arguments are required: --ranks"),
        (("--ranks", "0"), "argument --ranks: '0'; expected a whole number of at least 1"),
        (("--ranks", "100000"), "argument --ranks: 100000; expected at most 16384"),
        (("--ranks", "10", "--gpus-per-node", "8"), "argument --gpus-per-node: 10 ranks with 8 on each node; expected"),
        (("--ranks", "8", "--alpha", "5"), "argument --alpha: time '5'; expected a number and its unit, such as 300ns"),
        (("--ranks", "8", "--beta", "0GB/s"), "argument --beta: bandwidth '0GB/s'; expected a number above 0"),
        (("--ranks", "8", "--op", "sing"), "argument --op: invalid choice: 'sing'"),
        (("--ranks", "8", "--sizes", "1qB"), "argument --sizes: size '1qB'; expected bytes"),
        (("--ranks", "8", "--json", "/not/there.json"), "No such file or directory: '/not/there.json'"),
        (("--ranks", "8", "--plot", "/not/there.png"), "No such file or directory: '/not/there.png'"),
        (("--ranks", "8", "--plot", "picture.xyz"), "--plot picture.xyz: Format 'xyz' is not supported"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], text: str) -> None:
    assert cli.main(["cost", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("collectives: ") and err.count("\n") == 1
    assert text in err


def test_a_missing_matplotlib_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["cost", "--ranks", "8", "--plot", "picture.png"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "collectives: --plot needs matplotlib" in err and "pip install 'mpitrain[plot]'" in err


def test_check_covers_what_it_is_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["check", "--ranks", "1..3,8"]) == 0
    out, _ = capsys.readouterr()
    rows = [line.split() for line in out.splitlines() if line.rstrip().endswith(" yes")]
    assert [row[:2] for row in rows] == [[operation, name] for operation, names in BUILDERS.items() for name in names]
    shown = [" ".join(row) for row in rows]
    assert "all_reduce two_level 1..3, 8 (4 a node) 6 1.75 6, 1.75 yes" in shown
    assert "broadcast double_tree 1..3, 8 (root 7, 5 segments) 14 1 14, 1 yes" in shown
    assert all(" 1..3, 8 " in row for row in shown)
