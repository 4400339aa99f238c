"""What `bench`, `report` and `tune` make of their figures."""

import itertools
import json
import random
from collections import Counter
from math import inf
from pathlib import Path
from typing import Any

import pytest

from collectives.bench import bench_report
from collectives.bench.kit.turns import drawn_order
from collectives.bench.plot import plot
from collectives.bench.results import GLOO, RAW, CallOverhead, CollectivesLaunch, Measurement, Skipped, bus_factor
from collectives.bench.tuning import choose
from collectives.shared.units import parse_size, parse_sizes
from collectives.texts import show_bytes


def test_sizes() -> None:
    assert [parse_size(text) for text in ("4096", "1KiB", " 1.5 MiB", "2GiB", "7B")] == [
        4096,
        1024,
        3 << 19,
        2 << 30,
        7,
    ]
    assert parse_sizes("1KiB,3MiB") == [1024, 3 << 20]
    assert parse_sizes("1KiB..64KiB") == [1024, 4096, 16384, 65536]
    assert parse_sizes("1KiB..5000") == [1024, 4096]
    for text in ("", "1kb", "KiB", "-1", "1KiB;2KiB", "1e3"):
        with pytest.raises(ValueError, match="expected bytes, 1 at least, such as"):
            parse_size(text)
    with pytest.raises(ValueError, match="expected a range that rises"):
        parse_sizes("2KiB..1KiB")


def test_bytes_are_shown_in_the_largest_unit() -> None:
    assert [show_bytes(n) for n in (0, 1000, 1024, 1536, 64 << 20, 3 << 30)] == [
        "0 B", "1000 B", "1 KiB", "1.5 KiB", "64 MiB", "3 GiB",
    ]  # fmt: skip


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert [bus_factor("all_reduce", n) for n in (2, 4)] == [1.0, 1.5]
    for operation in ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"):
        assert bus_factor(operation, 4) == 0.75
    assert bus_factor("broadcast", 4) == bus_factor("reduce", 4) == 1.0


@pytest.mark.parametrize("num", [2, 5, 12])
def test_nobody_has_a_fixed_neighbour(num: int) -> None:
    rounds = [drawn_order(round_, num) for round_ in range(200 * num)]
    assert rounds[0] == drawn_order(0, num), "the same on all ranks"
    assert all(sorted(order) == list(range(num)) for order in rounds)
    for distance in (1, 2) if num > 2 else (1,):
        followed = Counter(pair for order in rounds for pair in zip(order, order[distance:], strict=False))
        assert len(followed) == num * (num - 1)
        expected = 200 * (num - distance) / (num - 1)
        assert all(abs(count - expected) < 6 * expected**0.5 for count in followed.values())


# Thresholds


def times(**of: list[float]) -> dict[int, dict[str, float]]:
    """Seconds of each algorithm at 1 KiB, 4 KiB, ..."""
    return {1024 << 2 * i: dict(zip(of, row, strict=True)) for i, row in enumerate(zip(*of.values(), strict=True))}


def test_the_fastest_is_chosen_from_half_way_between_two_sizes() -> None:
    assert choose(times(mpi=[1, 2, 9, 40], ring=[3, 4, 5, 20])) == ((8192, "mpi"), (None, "ring"))
    assert choose(times(mpi=[1, 2, 3, 4], ring=[3, 4, 5, 20])) == ((None, "mpi"),)
    assert choose(times(a=[1, 9, 9], b=[9, 1, 9], c=[9, 9, 1])) == ((2048, "a"), (8192, "b"), (None, "c"))


def test_who_is_not_clearly_faster_does_not_take_over() -> None:
    assert choose(times(mpi=[1, 1.04, 1, 1], ring=[1.2, 1, 1.2, 1.2])) == ((None, "mpi"),)
    # there and back again costs two changes
    assert choose(times(mpi=[1, 1.09, 1, 1], ring=[1.2, 1, 1.2, 1.2])) == ((None, "mpi"),)
    assert choose(times(mpi=[1, 1.2, 1, 1], ring=[1.2, 1, 1.2, 1.2])) == ((2048, "mpi"), (8192, "ring"), (None, "mpi"))
    # who is no longer measured is out of the question
    assert choose(times(mpi=[9, 1, 1], ring=[1, 9, inf])) == ((2048, "ring"), (None, "mpi"))
    # a draw goes to the first
    assert choose(times(mpi=[1, 1], ring=[1, 1])) == ((None, "mpi"),)
    # a little at many sizes is clear too
    assert choose(times(mpi=[1, 1.03, 1.03, 1.03], ring=[2, 1, 1, 1])) == ((2048, "mpi"), (None, "ring"))


def test_the_cheapest_of_all_possible_choices_is_found() -> None:
    """Against every one of them, on figures at random; and never much worse than the fastest at any size."""
    rng = random.Random(0)
    for _ in range(50):
        seconds = times(**{name: [rng.uniform(1, 1.3) for _ in range(5)] for name in "abc"})
        sizes = sorted(seconds)

        def cost(names: tuple[str, ...], seconds: Any = seconds, sizes: Any = sizes) -> float:
            slower = 1.0
            for size, name in zip(sizes, names, strict=True):
                slower *= seconds[size][name] / min(seconds[size].values())
            return slower * 1.05 ** sum(one != other for one, other in itertools.pairwise(names))

        choices = choose(seconds)
        taken = tuple(next(name for limit, name in choices if limit is None or size <= limit) for size in sizes)
        assert cost(taken) == pytest.approx(min(map(cost, itertools.product("abc", repeat=5))))
        for size, name in zip(sizes, taken, strict=True):
            assert seconds[size][name] <= 1.05**2 * 1.0001 * min(seconds[size].values())


# Files


def measurement(algorithm: str, seconds: float, memory: str = "private", nbytes: int = 1024) -> Measurement:
    return Measurement(
        "all_reduce", "float32", nbytes, algorithm, memory, seconds, nbytes / seconds, nbytes / seconds, 9
    )


def launch(scale: float = 1.0, **options: Any) -> CollectivesLaunch:
    """auto takes 1, 2 or 4 ms by scale, the others so many times as long."""
    auto = scale * 1e-3
    rows = [
        measurement(RAW, 2 * auto),
        measurement(GLOO, 10 * auto),
        measurement("auto", auto),
        measurement("ring", 0.8 * auto),
        measurement("tree", 3 * auto),
        measurement("auto", auto / 4, "node"),
        measurement("shared", auto / 4, "node"),
    ]
    over = [CallOverhead("all_reduce", 1024, "numpy", "mpi", 9e-6 * scale, 5e-6 * scale)]
    skipped = [Skipped("all_reduce", "float16", RAW, "private", "MPI has no float16 to reduce")]
    settings: dict[str, Any] = {
        "machine": {"cpu": "A", "cores": 2, "mpi": "M"},
        "ranks": 2,
        "nodes": 1,
        "arrays": "numpy",
    }
    return CollectivesLaunch(**{**settings, "results": rows, "skipped": skipped, "overhead": over, **options})


def test_a_launch_comes_back_from_its_file(tmp_path: Path) -> None:
    file = str(tmp_path / "a.json")
    launch().write(file)
    assert CollectivesLaunch.read(file) == launch()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: [],
        lambda data: {**data, "format": 99},
        lambda data: {name: value for name, value in data.items() if name != "ranks"},
        lambda data: {**data, "results": [{"operation": "all_reduce"}]},
        lambda data: {**data, "results": [{**data["results"][0], "seconds": "fast"}]},
        lambda data: {**data, "results": 5},
    ],
)
def test_another_file_is_refused_by_name(tmp_path: Path, damage: Any) -> None:
    file = tmp_path / "a.json"
    launch().write(str(file))
    file.write_text(json.dumps(damage(json.loads(file.read_text()))))
    with pytest.raises(ValueError, match=r"a\.json is no file of `python -m collectives bench --json`: "):
        CollectivesLaunch.read(str(file))
    file.write_text("{")
    with pytest.raises(ValueError, match=r"a\.json is no file of"):
        CollectivesLaunch.read(str(file))


def test_a_report_gives_medians_over_the_launches_of_ratios_within_each() -> None:
    # one launch was disturbed by as much for all: the ratios do not show it
    launches = [launch(1), launch(2), launch(50)]
    (line,) = bench_report.lines(launches, "all_reduce", "float32", "private")
    assert line == ("1 KiB", "2000.0", "0.001", "2.00x", "10.00x", "ring", "1.25x")
    (line,) = bench_report.lines(launches, "all_reduce", "float32", "node")
    assert line == ("1 KiB", "500.0", "0.002", "8.00x", "40.00x", "shared", "1.00x")
    alone = [launch(results=[measurement("auto", 1.0)])]
    assert bench_report.lines(alone, "all_reduce", "float32", "private")[0][3:] == ("", "", "", "")


def test_a_report_in_markdown() -> None:
    text = bench_report.markdown([launch(1), launch(2), launch(3), launch(1, ranks=4)])
    assert text.count("## 2 ranks on 1 node; A, 2 cores per node; M; numpy arrays\n") == 1
    assert text.count("## 4 ranks on 1 node; A") == 1
    assert "### all_reduce, float32, private memory, 2 ranks on 1 node, 3 launches\n" in text
    assert (
        "| size | auto µs | busbw GB/s | MPI / auto | Gloo / auto | best fixed | auto / best |\n| --- | ---: |" in text
    )
    assert "| 1 KiB | 2000.0 | 0.001 | 2.00x | 10.00x | ring | 1.25x |" in text
    assert "| all_reduce, 1 KiB, numpy, mpi | 18.00 | 10.00 | 8.00 |" in text


@pytest.mark.rest
def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "a.png"
    rows = [measurement("auto", 1e-3, nbytes=1024 << i) for i in range(3)]
    plot(str(file), [launch(results=[*rows, *launch().results])])
    assert file.read_bytes().startswith(b"\x89PNG")
