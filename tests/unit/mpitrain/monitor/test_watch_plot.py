"""Curves of braille characters: their places, ticks and limits; and series in bounded memory."""

import numpy as np
import pytest

from mpitrain.view.watch.plot import Curve, labels, limits, nice_ticks, plot
from mpitrain.view.watch.series import Thinned


def curve(*values: float, mark: str = "") -> Curve:
    return Curve(np.arange(1.0, len(values) + 1), np.array(values, float), "", mark)


def drawn(*curves: Curve, width: int, height: int, ascii_only: bool = False) -> list[str]:
    last = max((float(each.steps[-1]) for each in curves if len(each.steps)), default=1.0)
    return [line.plain for line in plot(curves, width=width, height=height, span=(1, last), ascii_only=ascii_only)]


def test_a_straight_line() -> None:
    assert drawn(curve(0, 4), width=10, height=5) == [
        "4┤     ⢀⠔⠊",
        "2┤  ⢀⡠⠊⠁  ",
        "0┤⡠⠔⠁     ",
        " └┬──────┬",
        "  1      2",
    ]  # fmt: skip


def test_a_line_a_mark_and_no_unicode() -> None:
    assert drawn(curve(2, 2, 2, 2), curve(1, 3, mark="●"), width=9, height=5) == [
        "3┤  ●    ",
        "2┤⠒⠒⠒⠒⠒⠒⠒",
        "1┤●      ",
        " └──┬───┬",
        "    2   4",
    ]  # fmt: skip
    plain = drawn(curve(2, 2, 2, 2), curve(1, 3, mark="●"), width=9, height=5, ascii_only=True)
    assert plain == ["3+  o    ", "2+'''''''", "1+o      ", " +--+---+", "    2   4"]


@pytest.mark.parametrize("values", [[], [2.5], [3, 3, 3], [0, 0], [1e-9, 3e-9], [-5, 1e15], list(range(1000))])
@pytest.mark.parametrize(("width", "height"), [(8, 3), (20, 4), (40, 10), (137, 33)])
def test_each_line_has_the_width(values: list[float], width: int, height: int) -> None:
    lines = drawn(curve(*values), width=width, height=height)
    assert [len(line) for line in lines] == [width] * height
    dots = sum(ord(character) >= 0x2800 for line in lines for character in line)
    assert (dots > 0) == (len(values) > 0)


def test_one_step_among_many_is_seen() -> None:
    values = np.ones(100_000)
    values[25_000:25_002] = 0.5
    values[50_000:] = 2.0
    lines = drawn(curve(*values), width=41, height=12)
    canvas = [line[len("1.0┤") :] for line in lines[:-2]]
    columns = len(canvas[0])
    lowest = [at for at, character in enumerate(canvas[-1]) if character != " "]
    assert len(lowest) == 1 and abs(lowest[0] - columns / 4) <= 1
    assert [character != " " for character in canvas[0]] == [at >= columns // 2 for at in range(columns)]


def test_limits_leave_few_outliers_out() -> None:
    ordinary = np.linspace(1.0, 2.0, 200)
    with_spike = np.append(ordinary, 1e6)
    low, high = limits([Curve(np.arange(201.0), with_spike, "")])
    assert low == 1.0 and 2.0 <= high < 3.0
    assert limits([Curve(np.arange(200.0), ordinary, "")]) == (1.0, 2.0)
    assert limits([]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [(0, 1, 3, [0, 0.5, 1]), (1, 3000, 3, [1000, 2000, 3000]), (-7, 12, 4, [-5, 0, 5, 10]), (2.01, 2.02, 2, [2.01, 2.02]),
     (0.4, 0.6, 1, [0.5]), (21_400, 22_700, 4, [21_500, 22_000, 22_500])],
)  # fmt: skip
def test_ticks(low: float, high: float, most: int, expected: list[float]) -> None:
    assert nice_ticks(low, high, most) == pytest.approx(expected)


def test_labels_tell_ticks_apart() -> None:
    assert labels([21_500, 22_000]) == ["21.5k", "22.0k"]
    assert labels([0, 5e5, 1e6]) == ["0.0M", "0.5M", "1.0M"]
    assert labels([2.01, 2.02]) == ["2.01", "2.02"]
    assert labels([-5, 0, 5]) == ["-5", "0", "5"]
    assert labels([]) == []


def test_a_long_series_has_few_points() -> None:
    thinned = Thinned(8)
    for step in range(1, 101):
        thinned.add(step, float(step))
        steps, values = thinned.points()
        assert len(steps) <= 8 and steps[-1] == step
    assert steps.tolist() == [16, 32, 48, 64, 80, 96, 100]
    assert values.tolist() == [8.5, 24.5, 40.5, 56.5, 72.5, 88.5, 98.5]
