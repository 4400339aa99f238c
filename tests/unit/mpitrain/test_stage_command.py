"""`python -m mpitrain schedules`: the table of proofs, and the pictures."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from mpitrain.stages import schedules_command
from mpitrain.stages.schedules import SCHEDULES

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.rest
def test_check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert schedules_command.main(["check", "--ranks", "3", "--micro-batches", "4", "--seconds", "0.1"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:7]]
    assert [row[0] for row in rows] == [*SCHEDULES]
    assert all(row[2] == "yes" and int(row[1].replace(",", "")) > 0 for row in rows)
    monkeypatch.setattr(schedules_command, "check", _refuse)
    assert schedules_command.main(["check", "--ranks", "1", "--micro-batches", "1", "--seconds", "0"]) == 1
    assert "1f1b on 1 ranks, 1 micro-batches: it is wrong" in " ".join(capsys.readouterr().out.split())


def _refuse(schedule: object) -> None:
    raise schedules_command.ScheduleError("it is wrong")


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        schedules_command.main(["show", "1f1b", "--ranks", "2", "--micro-batches", "3", "--times", "1", "1", "1", "0"])
        == 0
    )
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "rank 0 F0 F1 ·  ·  B0    F2 B1    ·  B2",
        "rank 1 ·  F0 B0    F1 B1    F2 B2",
        "12 s; idle at most 3 s a rank (25.0%)",
        "activations at most, in forwards of a stage, by rank: 2, 1",
    ]


def test_svg(tmp_path: Path) -> None:
    assert (
        schedules_command.main(["show", "zb-v", "--ranks", "3", "--micro-batches", "5", "--svg", f"{tmp_path}/x.svg"])
        == 0
    )
    root = ElementTree.parse(tmp_path / "x.svg").getroot()
    told = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert len(told) == 6 * 5 * 3  # each stage and micro-batch: F, I, W
    assert told[0] == "forward of stage 0, micro-batch 0: 0 to 0.5 s"
    right = max(float(rect.get("x", 0)) + float(rect.get("width", 0)) for rect in root.iter(f"{SVG}rect"))
    assert right <= float(root.get("width", 0))


def test_wrong_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        schedules_command.main(["show", "1f1b", "--ranks", "0"])
    assert "expected a whole number of at least 1, got 0" in capsys.readouterr().err
    with pytest.raises(ValueError, match="expected at least 2 x 4 ranks = 8 micro-batches, got 5"):
        schedules_command.main(["show", "dualpipe-v", "--micro-batches", "5"])
