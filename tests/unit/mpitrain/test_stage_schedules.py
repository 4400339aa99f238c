"""Schedules of a pipeline: the checker proves them and finds what is wrong, and they are those of torch and of the literature."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from mpitrain.stages.schedules import SCHEDULES, Action, Schedule, Times
from mpitrain.stages.schedules.check import ScheduleError, check, check_messages, drawn_schedules, small_schedules
from mpitrain.stages.schedules.forwards import forwards
from mpitrain.stages.schedules.timeline import timeline
from tests.helpers.extent import extent


@pytest.mark.rest
def test_small_and_drawn_schedules_are_proved() -> None:
    proved = [check(schedule) for schedule in small_schedules(*extent((6, 12), (16, 32)))]
    proved += [check(schedule) for schedule in islice(drawn_schedules(seed=0), extent(12, 100))]
    assert len(proved) > 400


Programs = list[tuple[Action, ...]]


def _without_one(programs: Programs) -> None:
    programs[1] = programs[1][:-1]


def _twice(programs: Programs) -> None:
    programs[1] = (*programs[1], programs[1][-1])


def _elsewhere(programs: Programs) -> None:
    programs[0], programs[1] = programs[1], programs[0]


def _backward_first(programs: Programs) -> None:
    programs[2] = (programs[2][1], programs[2][0], *programs[2][2:])


def _last_first(programs: Programs) -> None:
    programs[0] = (programs[0][1], programs[0][0], *programs[0][2:])


def _no_such(programs: Programs) -> None:
    programs[2] = (*programs[2][:-1], programs[2][-1]._replace(micro=6))


def _waiting_for_each_other(programs: Programs) -> None:
    """Rank 0 wants a gradient before it has sent what rank 1 needs for it."""
    backward = Action("B", 0, 0)
    others = [action for action in programs[0] if action != backward]
    programs[0] = (others[0], backward, *others[1:])
    programs[1] = tuple(sorted(programs[1], key=lambda action: action.kind, reverse=True))


BROKEN: dict[str, tuple[Callable[[Programs], None], str]] = {
    "without an action": (_without_one, "expected 18 forwards and as many backwards, got"),
    "an action twice": (_twice, r"B1\.5 runs 2 times"),
    "on another rank": (_elsewhere, r"rank 0 runs F1\.0, but its stage is on rank 1"),
    "backward first": (_backward_first, r"rank 2 runs B2\.0 before F2\.0"),
    "messages": (_last_first, "rank 0 sends activations to rank 1 in another order than they are needed"),
    "no such micro-batch": (_no_such, r"rank 2 runs B2\.6, but there is no such stage or micro-batch"),
    "deadlock": (_waiting_for_each_other, "deadlock: rank . waits for ever before"),
}


def broken(change: Callable[[Programs], None]) -> Schedule:
    schedule = SCHEDULES["1f1b"](3, 6)
    programs = [schedule.program(rank) for rank in range(3)]
    change(programs)
    return replace(schedule, program=programs.__getitem__, peak=lambda rank: _peak(programs[rank]))


def _peak(program: Sequence[Action]) -> int:
    held = [0]
    for action in program:
        held.append(held[-1] + {"F": 1, "W": 0}.get(action.kind, -1))
    return max(held)


@pytest.mark.parametrize("case", BROKEN)
def test_a_wrong_schedule_is_found(case: str) -> None:
    change, message = BROKEN[case]
    with pytest.raises(ScheduleError, match=message):
        check(broken(change))


def test_gradients_of_weights_in_another_order_are_found() -> None:
    """Slices need their order; no message does."""
    schedule = SCHEDULES["zb-h1"](2, 3)
    *others, last_but_one, last = schedule.program(1)
    programs = [schedule.program(0), (*others, last, last_but_one)]
    with pytest.raises(ScheduleError, match=r"rank 1 runs W1\.2 before that of micro-batch 1"):
        check(replace(schedule, program=programs.__getitem__))


def test_a_promise_that_is_not_kept_is_found() -> None:
    schedule = SCHEDULES["1f1b"](3, 6)
    with pytest.raises(ScheduleError, match="rank 0 holds the activations of 3 forwards; the formula says 2"):
        check(replace(schedule, peak=lambda rank: 2))
    with pytest.raises(ScheduleError, match=r"a rank idles for 6 s at .*; the formula says 5 s"):
        check(replace(schedule, idle=lambda times: 5))


def test_numbers_for_which_a_schedule_is_not_defined() -> None:
    with pytest.raises(
        ValueError, match="interleaved: 9 micro-batches on 4 ranks cannot be divided into 2 equal rounds"
    ):
        SCHEDULES["interleaved"](4, 9, 2)
    with pytest.raises(ValueError, match="dualpipe-v: expected at least 2 x 4 ranks = 8 micro-batches, got 7"):
        SCHEDULES["dualpipe-v"](4, 7)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-v", "dualpipe-v"])
def test_programs_are_torchs(name: str) -> None:
    """Without torch's idle slots. Its raw 1F1B numbers the forwards of the last stage from 1 on, and with fewer micro-batches
    than ranks it has forwards of micro-batches that do not exist."""
    compared = 0
    for schedule in small_schedules(*extent((6, 16), (10, 32))):
        if schedule.name != name or (name == "1f1b" and schedule.num_micro < schedule.num_ranks):
            continue
        for rank in range(schedule.num_ranks):
            ours, theirs = list(map(tuple, schedule.program(rank))), torchs(schedule, rank)
            if name == "1f1b" and rank == schedule.num_ranks - 1:
                theirs = [(kind, stage, micro - (kind == "F")) for kind, stage, micro in theirs]
            assert ours == theirs
            compared += 1
    assert compared > 100


_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def torchs(schedule: Schedule, rank: int) -> list[tuple[str, int, int]]:
    """A rank's actions from torch, which computes them without process groups for an object that has the numbers."""
    kinds: dict[str, Any] = {
        "gpipe": torch_schedules.ScheduleGPipe,
        "1f1b": torch_schedules.Schedule1F1B,
        "interleaved": torch_schedules.ScheduleInterleaved1F1B,
        "zb-v": torch_schedules.ScheduleZBVZeroBubble,
        "dualpipe-v": torch_schedules.ScheduleDualPipeV,
    }
    made = object.__new__(kinds[schedule.name])
    made._n_microbatches, made.pp_group_size = schedule.num_micro, schedule.num_ranks
    made._num_stages = made.num_stages = schedule.num_stages
    made.n_local_stages = schedule.stages_per_rank
    made.number_of_rounds = max(1, schedule.num_micro // schedule.num_ranks)
    made.microbatches_per_round = schedule.num_micro // made.number_of_rounds
    if schedule.stages_per_rank == 1:
        actions = made._get_pipeline_order()[rank]
    else:
        actions = made._calculate_single_rank_operations(rank)
    flat = [part for action in actions if action is not None for part in action.sub_actions or (action,)]
    return [
        (_KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
        for action in flat
        if action.computation_type.name in _KINDS
    ]


# Model, ranks, micro-batches, milliseconds of F, I, W and a message; the shares of idle time of 1F1B, ZB-H1 and interleaved 1F1B.
# Qi et al., Zero Bubble Pipeline Parallelism, 2401.10241: the tables of profiled times and of bubble rates. With 22 layers, the
# embedding and the head, each of the 8 ranks has 3 stages of one layer in interleaved 1F1B.
PUBLISHED = [
    ("1.5B", 8, 24, (18.522, 18.086, 9.337, 0.601), 0.2431, 0.1585, 0.1055),
    ("1.5B", 8, 32, (18.513, 18.086, 9.331, 0.626), 0.1985, 0.1242, 0.0818),
    ("1.5B", 8, 64, (18.546, 18.097, 9.321, 0.762), 0.1240, 0.0674, 0.0443),
]


@pytest.mark.parametrize(("model", "ranks", "micro", "times", "of_1f1b", "of_zb_h1", "of_interleaved"), PUBLISHED)
def test_published_shares_of_idle_time(
    model: str,
    ranks: int,
    micro: int,
    times: tuple[float, ...],
    of_1f1b: float,
    of_zb_h1: float,
    of_interleaved: float,
) -> None:
    def idle(name: str, *more: int) -> float:
        run = timeline(SCHEDULES[name](ranks, micro, *more), Times(*times))
        took = max(map(run.span, range(ranks)))
        return (took - micro * Times(*times).work) / took

    assert round(idle("1f1b"), 4) == of_1f1b
    assert round(idle("zb-h1"), 4) == of_zb_h1
    assert idle("interleaved", 3) == pytest.approx(of_interleaved, rel=0.05)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_forwards_alone(name: str, num_ranks: int) -> None:
    """Each once, in a possible order, with messages in order, and without idle time but for the first and the last micro-batch."""
    for v in (2, 3) if name == "interleaved" else (2,):
        more = {"stages_per_rank": v} if name == "interleaved" else {}
        made = SCHEDULES[name](num_ranks, 2 * num_ranks, **more)
        for num_micro in (*range(1, 2 * num_ranks + 2), 40 * num_ranks):
            alone = forwards(made, num_micro)
            programs = [alone.program(rank) for rank in range(num_ranks)]
            assert sorted(action for program in programs for action in program) == [
                ("F", stage, micro) for stage in range(made.num_stages) for micro in range(num_micro)
            ]
            check_messages(alone, programs)
            run = timeline(alone, Times(made.stages_per_rank, 0, 0))  # a second for each action
            if num_micro % num_ranks == 0 or made.stages_per_rank == 1:
                assert max(map(run.span, range(num_ranks))) - num_micro * made.stages_per_rank <= num_ranks - 1 + (
                    num_ranks if name in ("zb-v", "dualpipe-v") else 0
                )
