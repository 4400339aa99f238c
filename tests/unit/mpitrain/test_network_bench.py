"""Arguments and tables of `python -m mpitrain bench wire` and `bench losses`."""

import io
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console

from collectives.codec.formats import FORMATS
from mpitrain.job.config import check_ranks, parse
from mpitrain.job.config.parallel import Wire
from mpitrain.tools.bench.network import losses, wire
from mpitrain.tools.bench.network.results import (
    LossesLaunch,
    LossRun,
    WireLaunch,
    WireRow,
    loss_tables,
    wire_tables,
)
from mpitrain.tools.bench.results import BenchCase

CASE = BenchCase(width=64, layers=2, heads=2, context=16, batch=1)


def shown(tables: Any) -> list[list[str]]:
    """The words of each line."""
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(*tables, sep="\n")
    return [line.split() for line in console.export_text().splitlines()]


def wire_launch(nodes: int, **step_s: float) -> WireLaunch:
    sent = {"fp32": 4_000_000, "bf16": 2_000_000, "int8": 1_016_000}
    rows = [WireRow(0, name, s, s, s, sent[name], sent[name], 5.0) for name, s in step_s.items()]
    return WireLaunch({}, 2, nodes, threads=1, case=CASE, codec="avx2", steps=8, rows=rows)


def test_the_settings_have_the_formats_of_the_codec() -> None:
    assert get_args(Wire) == (*FORMATS, "auto")


def test_the_excess_is_that_over_the_same_ranks_on_one_node() -> None:
    here, beside = wire_launch(2, fp32=0.7, bf16=0.4, int8=0.25), wire_launch(1, fp32=0.1)
    lines = shown(wire_tables(here, beside))
    assert ["0", "fp32", "700.0", "700.0", "..", "700.0", "4.00", "1.000", "4.00", "100.0", "600.0", "1.000"] in lines
    assert ["0", "int8", "250.0", "250.0", "..", "250.0", "1.02", "0.254", "1.02", "100.0", "150.0", "0.250"] in lines
    assert ["0", "bf16", "400.0", "400.0", "..", "400.0", "2.00", "0.500", "2.00"] in shown(wire_tables(here, None))


def test_losses_are_compared_seed_by_seed() -> None:
    runs = [LossRun("exact", seed, 2.0 + seed, 1000, 1.0) for seed in range(3)]
    runs += [LossRun("int8", seed, 2.0 + seed + 0.001 * (seed + 1), 254, 1.0) for seed in range(2)]
    launch = LossesLaunch({}, 4, 4, settings=["--train.steps", "250"], cases={"exact": [], "int8": []}, runs=runs)
    lines = shown(loss_tables(launch, reference="exact"))
    assert ["int8", "2", "2.5015", "+0.0015", "0.0005", "+0.0010", "+0.0020", "0.0", "0.254"] in lines
    assert not any("bf16" in line for line in lines)


@pytest.mark.parametrize("case", losses.CASES)
def test_settings_of_cases(case: str) -> None:
    """Their names tell what they send."""
    config = parse([*losses.SETTINGS, *losses.CASES[case].settings.replace("RANKS", "4").split()])
    check_ranks(config, 4)
    parallel = config.parallel
    kind, _, rest = case.replace("power-sgd", "power_sgd").replace("top-k", "top_k").partition("-")
    wire = kind if kind in get_args(Wire) else "fp32"
    assert (parallel.wire, parallel.wire_weights) == (wire, wire if rest == "weights" else "fp32")
    assert parallel.compress == (kind if kind in ("power_sgd", "top_k") else "none")
    assert (parallel.copies, parallel.local_steps) == ((4, int(rest)) if kind == "diloco" else (1, 0))
    if kind == "power_sgd":
        assert parallel.compress_rank == int(rest)
    if kind == "top_k":
        share, _, alone = rest.partition("-")
        assert (parallel.compress_share, parallel.compress_feedback) == (int(share) / 100, not alone)
    assert parallel.exact_steps == (50 if kind in ("power_sgd", "diloco") else 0)


def test_help_of_losses_tells_each_case(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        losses._parse(["--help"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {f"{name} {case.meaning}" for name, case in losses.CASES.items()} <= set(lines)


def test_a_bench_goes_on_only_with_runs_of_the_same_kind(tmp_path: Path) -> None:
    file, runs = str(tmp_path / "losses.json"), [LossRun("exact", 0, 2.0, 1000, 1.0)]
    launch = LossesLaunch({}, 4, 4, settings=["--train.steps", "250"], cases={"exact": []}, runs=runs)
    launch.write(file)
    other = LossesLaunch({}, 4, 4, settings=["--train.steps", "250"], cases={"int8": ["--parallel.wire", "int8"]})
    found = losses._with_earlier(other, file)
    assert list(found.runs) == runs and list(found.cases) == ["exact", "int8"]
    with pytest.raises(
        ValueError, match=r"has runs of 4 ranks on 4 nodes with --train\.steps 250; expected 2 ranks on 1 node"
    ):
        losses._with_earlier(LossesLaunch({}, 2, 1, settings=["--train.steps", "9"], cases={}), file)


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (
            wire._parse,
            ["--wires", "int4"],
            "bench wire: argument --wires: invalid choice: 'int4'; expected of fp32, bf16",
        ),
        (wire._parse, ["--shape", "64x2x1,32x2x1"], "bench wire: --shape takes one shape"),
        (wire._parse, ["--heads", "3"], "bench wire: model.width: expected a multiple of model.heads = 3, got 512"),
        (
            losses._parse,
            ["--cases", "int4"],
            "bench losses: argument --cases: invalid choice: 'int4'; expected of exact",
        ),
    ],
)
def test_wrong_arguments(main: Any, words: list[str], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        main(words)
    assert str(caught.value).startswith(message)
