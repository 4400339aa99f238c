"""Records of steps: from timelines of known times come these times, their idle time by cause, and a picture."""

import xml.etree.ElementTree as ET

import pytest

from mpitrain.stages.records import Measured
from mpitrain.stages.schedules import SCHEDULES, Schedule, StageTimes, Times
from mpitrain.stages.schedules.timeline import timeline

NAMES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]


def unequal(schedule: Schedule, message: float) -> StageTimes:
    """Times that differ by stage."""
    stages = range(schedule.num_stages)
    return StageTimes(
        tuple({"F": 2 + stage / 8, "B": 4 + stage / 4, "I": 2 + stage / 8, "W": 2 + stage / 8} for stage in stages),
        message,
    )


@pytest.mark.parametrize("name", NAMES)
def test_equal_stages_take_the_times_of_a_rank(name: str) -> None:
    schedule = SCHEDULES[name](4, 8)
    v = schedule.stages_per_rank
    each = StageTimes(({"F": 3 / v, "B": 5 / v, "I": 2 / v, "W": 3 / v},) * schedule.num_stages, 0.25)
    assert timeline(schedule, each) == timeline(schedule, Times(3, 2, 3, 0.25))


@pytest.mark.parametrize("name", NAMES)
def test_the_times_of_a_timeline_are_found(name: str) -> None:
    schedule = SCHEDULES[name](4, 8)
    times = unequal(schedule, 0.5)
    run = timeline(schedule, times)
    found = Measured(schedule, [run, run], [run.total, run.total], 0.0).times()
    kinds = {action.kind for program in run.programs for action in program}
    for stage, seconds in enumerate(found.stages):
        assert seconds.keys() <= kinds
        assert seconds == pytest.approx({kind: times.stages[stage][kind] for kind in seconds})
    assert found.message == pytest.approx(0.5)
    assert Measured(schedule, [run], [run.total], 0.0).planned().total == pytest.approx(run.total)


@pytest.mark.parametrize("name", NAMES)
def test_idle_time_by_cause(name: str) -> None:
    schedule = SCHEDULES[name](4, 8)
    times = Times(1, 1, 1)
    run = timeline(schedule, times)
    idle = Measured(schedule, [run], [run.total], 0.0).idle()
    busy = schedule.num_micro * times.work
    assert idle == pytest.approx((1 - busy / run.total, 0, 0, 0))
    late = timeline(schedule, times._replace(message=0.125))
    period = late.total + 2 + 3  # two seconds until the end of the step, three until the next step
    shares = Measured(schedule, [late], [late.total + 2], 3.0).idle()
    assert shares.messages > 0
    assert (shares.end, shares.between) == pytest.approx((2 / period, 3 / period))
    assert sum(shares) == pytest.approx(1 - busy / period)


def test_the_picture_has_both_timelines() -> None:
    schedule = SCHEDULES["zb-v"](2, 4)
    run = timeline(schedule, unequal(schedule, 0.5))
    root = ET.fromstring(Measured(schedule, [run], [run.total], 1.0).svg())
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    boxes = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(text.startswith("planned, zb-v, 4 micro-batches") for text in texts) == 1
    assert (
        sum(text.startswith(f"measured: {run.total:.4g} s; idle of the last 1 steps: schedule ") for text in texts) == 1
    )
    assert len(boxes) == 2 * sum(map(len, run.programs))
    assert sum(box.startswith("gradients of weights of stage 3, micro-batch 2: ") for box in boxes) == 2
