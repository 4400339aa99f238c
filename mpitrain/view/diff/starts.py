"""The conditions of a recorded run. Pure."""

from itertools import groupby
from typing import Any

from mpitrain.job.record.conditions import Conditions, of_start
from mpitrain.view.reading.run import RunRecord

_MOST_STARTS = 100
"""The last starts and resumes, that are compared."""


def of_run(run: RunRecord) -> Conditions:
    """Of a run: what the events of its starts and resumes tell, and the settings."""
    starts = [of_start(event.fields) for event in run.events if event.kind == "begin"][-_MOST_STARTS:]
    if not starts and run.num_ranks is not None:
        starts = [{"ranks": run.num_ranks}]
    hardware: dict[str, Any] = {}
    for name in dict.fromkeys(name for start in starts for name in start):
        values = [str(value) for value, _ in groupby(start.get(name, "unknown") for start in starts)]
        hardware[name] = ", then ".join(values)
    return Conditions(hardware, run.settings)
