"""Schedules with one stage on each rank."""

from collections.abc import Callable
from functools import partial

from mpitrain.stages.schedules.program import Program
from mpitrain.stages.schedules.schedule import Action, Schedule, Times


def gpipe(num_ranks: int, num_micro: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, 1811.06965)."""

    def program(rank: int) -> tuple[Action, ...]:
        made = Program()
        for _ in range(num_micro):
            made.forward(rank)
        for _ in range(num_micro):
            made.backward(rank)
        return made.actions()

    return Schedule("gpipe", num_ranks, num_micro, 1, program, _rank_of, _fill(num_ranks), lambda rank: num_micro)


def one_f_one_b(num_ranks: int, num_micro: int) -> Schedule:
    """Each backward as soon as possible, so a rank holds fewer activations (Narayanan et al. 2021, 2104.04473, section 2.2)."""

    program = partial(_program_of_1f1b, num_ranks, num_micro, False)
    return Schedule(
        "1f1b", num_ranks, num_micro, 1, program, _rank_of, _fill(num_ranks), _peak_of_1f1b(num_ranks, num_micro)
    )


def zero_bubble_h1(num_ranks: int, num_micro: int) -> Schedule:
    """1F1B, in which the gradients of weights wait, on rank r for r micro-batches (Qi et al. 2023, 2401.10241, section 2.1).

    The ranks hold as many activations as with 1F1B, and idle for a third of the time if the three kinds of actions take equally long.
    """

    def idle(times: Times) -> float:
        waits = (num_ranks - 1) * (times.forward + times.input_grads)
        return waits - (min(num_micro, num_ranks) - 1) * min(times.weight_grads, times.forward)

    program = partial(_program_of_1f1b, num_ranks, num_micro, True)
    return Schedule("zb-h1", num_ranks, num_micro, 1, program, _rank_of, idle, _peak_of_1f1b(num_ranks, num_micro))


def _program_of_1f1b(num_ranks: int, num_micro: int, split: bool, rank: int) -> tuple[Action, ...]:
    """The program of 1F1B. `split`: with backwards in two halves, as in ZB-H1."""
    made, ahead = Program(), min(num_ranks - 1 - rank, num_micro)
    for _ in range(ahead):
        made.forward(rank)
    for micro in range(num_micro):
        if ahead + micro < num_micro:
            made.forward(rank)
        made.backward(rank, split=split)
        if micro >= rank:
            made.weights()
    for _ in range(min(rank, num_micro)):
        made.weights()
    return made.actions()


def _rank_of(stage: int) -> int:
    return stage


def _fill(num_ranks: int) -> Callable[[Times], float]:
    """The idle time if the first micro-batch must reach the last rank, and the last gradient the first rank."""
    return lambda times: (num_ranks - 1) * times.work


def _peak_of_1f1b(num_ranks: int, num_micro: int) -> Callable[[int], int]:
    return lambda rank: min(num_ranks - rank, num_micro)
