"""What `python -m ckpt bench` makes of its arguments and figures."""

import argparse
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from ckpt.bench.bench_report import GOALS, Goal, goals, tables
from ckpt.bench.results import BACKGROUND, DCP, LARGE, POSIX, TINY, ActionRow, CheckpointLaunch, ours
from ckpt.bench.state import NUM_TINY, UNIT, Cut, Memory, large, tiny, training
from ckpt.cli import main
from ckpt.commands import bench
from collectives.bench.kit.launches import alike

# Arguments


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_to(parser.add_subparsers())
    return parser.parse_args(["bench", *words])


def test_arguments() -> None:
    args = parsed()
    assert (args.peers, args.drivers, args.layouts) == (["posix", "dcp"], ["posix"], ["rank", "one"])
    assert (args.size, args.rounds, args.dir, args.cold) == (1_200_000_000, 5, None, False)
    args = parsed("--peers", "", "--layouts", "node, 2,2", "--size", "8MB", "--drivers", "mpio,posix", "--cold")
    assert (args.peers, args.drivers, args.layouts) == ([], ["mpio", "posix"], ["node", 2])
    assert (args.size, args.cold) == (8_000_000, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "1.2XB"], "size '1.2XB'; expected bytes, 1 at least, such as"),
        (["--peers", "posix,ftp"], "invalid choice: 'ftp'; expected of posix, dcp"),
        (["--drivers", "mpi"], "invalid choice: 'mpi'; expected of posix, mpio, mpio-collective"),
        (["--rounds", "0"], "'0'; expected a whole number of at least 1"),
    ],
)
def test_wrong_arguments(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parsed(*words)
    assert error.value.code == 2 and message in capsys.readouterr().err


# What is saved


@pytest.mark.parametrize("cuts", [training(), tiny(), large()])
def test_all_ways_to_cut_hold_the_same_memory(cuts: list[Cut]) -> None:
    memory = Memory(2 * 3 * UNIT * 4 + 11, rank=1, size=3)
    memory.fill()
    assert memory.scale == 2 and memory.nbytes == 2 * 3 * UNIT * 4
    arrays = memory.arrays(cuts)
    assert len(arrays) == len(cuts) and len(memory.arrays(tiny())) == NUM_TINY
    assert np.array_equal(np.concatenate([array.ravel() for array in arrays.values()]), memory.flat)
    assert all(np.shares_memory(array, memory.flat) for array in arrays.values())
    for name, shard in memory.shards(cuts).items():
        rows, columns = arrays[name].shape
        assert shard.shape == (3 * rows, columns) and shard.offset == (rows, 0) and shard.data is not None
        assert math.prod(shard.shape) == 3 * arrays[name].size


def test_a_state_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="--size is 143999 bytes; expected at least 144000, for 2 ranks"):
        Memory(143_999, rank=0, size=2)


# Figures

SECONDS = {
    (ours("rank"), "save"): 2.0,
    (ours("rank"), "load"): 0.5,
    (ours("one"), "save"): 4.0,
    (ours("one", "mpio"), "save"): 8.0,
    (POSIX, "save"): 1.9,
    (POSIX, "load"): 0.25,
    (BACKGROUND, "pause"): 0.26,
    (BACKGROUND, "copy"): 0.2,
    (TINY, "save"): 3.0,
    (LARGE, "save"): 2.0,
}


def launch(factors: dict[str, float], **fields: object) -> CheckpointLaunch:
    """With `SECONDS`, those of a contestant times its factor."""
    rows = [
        ActionRow(name, action, seconds * factors.get(name, 1.0), 0.1, 9.0)
        for (name, action), seconds in SECONDS.items()
    ]
    made = CheckpointLaunch(
        machine={"cpu": "a CPU", "cores": 2},
        ranks=2,
        nodes=1,
        nbytes=1_000_000_000,
        tensors=48,
        rounds=3,
        cold=False,
        rows=rows,
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def by_words(launches: list[CheckpointLaunch]) -> dict[str, Goal]:
    return {goal.what: goal for goal in goals(launches)}


def test_a_goal_is_a_ratio_within_a_launch_and_its_median_over_them() -> None:
    launches = [launch({POSIX: factor}) for factor in (1.0, 4.0, 2.0)]
    found = by_words(launches)
    against_posix = found["save, a file per rank, against POSIX"]
    assert against_posix.ratio(launches) == pytest.approx(1.9)
    assert against_posix.ratio(launches[:1]) == pytest.approx(0.95)
    assert found["load against POSIX"].ratio(launches[:1]) == pytest.approx(0.5)
    pause = found["in the background: blocked time, against a memcpy"]
    assert pause.ratio(launches) == pytest.approx(1.3)
    assert found["save 2,000 tensors, against 8 of the same bytes"].ratio(launches) == pytest.approx(1.5)
    # nobody measured DCP, but another driver, of which nothing is asked
    assert not any("DCP" in what for what in found)
    more = found["save, ckpt one, mpio, against POSIX"]
    assert more.ratio(launches[:1]) == pytest.approx(1.9 / 8) and more.is_reached(0.1) is None
    assert set(found) - {goal.what for goal in GOALS} == {more.what}


def test_reached_is_no_less_and_no_more() -> None:
    least, most = Goal("", ("", ""), ("", ""), 0.95), Goal("", ("", ""), ("", ""), 1.3, at_least=False)
    assert [least.is_reached(ratio) for ratio in (0.94, 0.95, 2.0)] == [False, True, True]
    assert [most.is_reached(ratio) for ratio in (1.0, 1.3, 1.31)] == [True, True, False]


def test_what_cannot_be_compared_is_not_put_together() -> None:
    launches = [launch({}), launch({}, cold=True), launch({}, ranks=4), launch({POSIX: 2.0})]
    assert alike(launches) == [[launches[0], launches[3]], [launches[1]], [launches[2]]]


def test_tables() -> None:
    console = Console(width=240)
    with console.capture() as shown:
        console.print(*tables([launch({}, skipped={DCP: "torch is not installed"}), launch({})]), sep="\n")
    text = " ".join(shown.get().split())
    assert (
        "2 ranks on 1 node, a CPU; 1 GB in 48 tensors; loads with the files in the page cache; 2 launches of 3" in text
    )
    assert "ckpt rank 2.000 0.50 0.500 2.00" in text
    assert "save, one file, against POSIX 4 s 1.9 s 0.47x at least 0.85x missed" in text
    assert "blocked time, against a memcpy 260 ms 200 ms 1.30x at most 1.3x reached" in text
    assert "skipped DCP: torch is not installed" in text


def test_the_file_is_read_back_and_another_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, broken = tmp_path / "a.json", tmp_path / "b.json"
    launch({}, skipped={DCP: "no"}).write(str(file))
    assert CheckpointLaunch.read(str(file)) == launch({}, skipped={DCP: "no"})
    assert main(["bench", "--report", str(file), str(file)]) == 0
    assert "2 launches of 3 rounds" in capsys.readouterr().out
    broken.write_text("{}")
    for path, message in ((broken, "is no file of `python -m ckpt bench --json`"), (tmp_path / "c", "No such file")):
        assert main(["bench", "--report", str(path)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("ckpt: ") and err.count("\n") == 1 and message in err
