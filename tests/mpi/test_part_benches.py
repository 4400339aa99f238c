"""`python -m mpitrain bench muon`, `bench batch-norm` and `bench compression` with small sizes on one node."""

import json
import re
from pathlib import Path

import pytest

from collectives import Communicator
from mpitrain.tools.bench.network import compression
from mpitrain.tools.bench.parts import batch_norm, muon

pytestmark = pytest.mark.ranks(2)


def table(text: str) -> dict[str, list[str]]:
    """The cells of each row of a Markdown table, by the first cell."""
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if "|" in line]
    return {first: cells for first, *cells in rows[2:]}


def test_muon(comm: Communicator, shared_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = shared_tmp / "muon.json"
    words = ["--width", "16", "--layers", "1", "--steps", "2", "--threads", "1", "--ns-dtype", "float32"]
    muon.main([*words, "--json", str(file)], comm)
    if comm.rank == 0:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert [(row["name"], row["ranks"], row["ns_dtype"]) for row in rows] == [
            (name, 2, "float32") for name in (muon.OWNERS, muon.EVERY, muon.ADAMW)
        ]
        shown = table(capsys.readouterr().out)
        assert shown[muon.EVERY][-1] == "1.00" and len(shown) == 3
        for row in rows:
            median, least, most = row["step_s"]
            assert 0 < least <= median <= most
            assert shown[row["name"]][0] == f"{median * 1e3:.2f}"


def test_batch_norm(comm: Communicator, capsys: pytest.CaptureFixture[str]) -> None:
    batch_norm.main(["--rounds", "2"], comm)
    if comm.rank == 0:
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == len(batch_norm.SHAPES)
        for line, shape in zip(lines, batch_norm.SHAPES, strict=True):
            assert line.startswith(f"input {' x '.join(map(str, shape))} on each of 2 ranks")
            ours, gloos, ratio = map(float, re.findall(r"[\d.]+(?= ms)|[\d.]+$", line))
            assert ours > 0 and gloos > 0 and ratio == pytest.approx(ours / gloos, rel=0.1, abs=0.01)


def test_compression(comm: Communicator, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--width", "32", "--layers", "1", "--rounds", "2", "--threads", "1", "--top-k", "0.1"]
    compression.main(words, comm)
    if comm.rank == 0:
        out = capsys.readouterr().out
        shown = table(out)
        assert set(shown) == {"exact", "power_sgd", "top_k", "torch's"}, out
        assert shown["torch's"][-1] == "1.00"
        assert all(float(median.removesuffix(" ms")) > 0 for median, *_ in shown.values())


@pytest.mark.parametrize("bench", [muon, batch_norm, compression])
def test_a_wrong_argument_is_one_error_on_all_ranks(comm: Communicator, bench: object) -> None:
    with pytest.raises(ValueError, match=r"^bench [a-z-]+: argument --(rounds|steps): '0'; expected a whole number"):
        bench.main(["--steps" if bench is muon else "--rounds", "0"], comm)  # type: ignore[attr-defined]
