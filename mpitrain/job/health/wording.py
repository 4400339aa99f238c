"""The sentences of reports. Pure."""

from collections.abc import Callable, Mapping, Sequence

from mpitrain.job.health.replicas import Difference
from mpitrain.job.health.resting import Change
from mpitrain.job.health.spikes import Spike

MOST = 4
"""Tensors or ranks that a message lists."""

Place = Callable[[int], str]
"""A rank and its host, in words."""


def desync(difference: Difference, place: Place) -> str:
    """Which copies differ, and where first."""
    (suspects, is_clear), names, first = difference
    ranks = " and ".join(place(rank) for rank in suspects[:MOST]) + " and others" * (len(suspects) > MOST)
    if is_clear:
        said = f"{ranks} differ{'s' * (len(suspects) == 1)} from the majority of the ranks that hold the same"
    else:
        said = f"{ranks} differ, and no majority of copies tells which of them is wrong"
    return f"{said}: {listed(names)}. First difference: {first}"


def flips(changed: Mapping[int, Sequence[Change]], place: Place) -> str:
    """What changed on each rank."""
    said = []
    for rank, changes in list(changed.items())[:MOST]:
        bit = changes[0].bit if len(changes) == 1 else None
        what = "bits" if bit is None else f"bit {bit} of an element ({changes[0].dtype})"
        said.append(f"{place(rank)}: {what} of {listed([change.name for change in changes])} changed")
    others = "; and other ranks" * (len(changed) > MOST)
    return f"{'; '.join(said)}{others}, though nothing wrote there since the last optimizer's step"


def spikes(found: Sequence[Spike]) -> str:
    """The spikes of one step."""
    return "spike: " + "; ".join(
        f"{spike.what} {spike.value:.4g} is {spike.score:.0f} robust standard deviations above its median {spike.median:.4g}"
        for spike in found
    )


def left_out(first: int, last: int, samples: tuple[int, int]) -> str:
    """The steps, counted from 0, and the samples that a run leaves out."""
    steps = f"steps {first + 1} to {last + 1}" if last > first else f"step {last + 1}"
    return f"the data of {steps} are left out, samples {samples[0]} to {samples[1] - 1}"


def listed(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    shown = ", ".join(names[:MOST])
    return shown if len(names) <= MOST else f"{shown} and {len(names) - MOST} more"
