"""The parts of a step: seconds by layer, kind of work and rank. Pure: no torch, no MPI."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from mpitrain.tools.profile.places import BLOCK, GRADIENTS, OTHER, STAGES, Place, PlaceTimes

KINDS = {
    "forward": "computes the outputs",
    "backward": "computes the gradients, and again what is not kept",
    "own work": "of a part that is no layer, such as the optimizer",
    "transfer": "communication that nothing hides, without the waits",
    "wait": "until other ranks come to the same communication",
}
"""The kinds of work of a layer, and what each is."""

LAYERS = {
    "embedding": "embedding",
    "blocks": "blocks",
    "weights": "gradients of weights, left for later",
    "head": "head and loss",
    "passes": "all layers",
    "gradients": "end of the reductions",
    "other stages": "other stages",
    "optimizer": "optimizer",
    "data": "data",
    "sums": "sums of loss and counts",
    "communication": "communication",
    "checks": "checks",
    "monitor": "record of the run",
    "other": "other",
}
"""What has time in a step, in the order of a table. The record of a run has "passes" and "communication" in place of layers."""

Seconds = list[float]
"""Of each rank."""


@dataclass(frozen=True)
class Parts:
    """The mean seconds of a step, which add up to the step on each rank.

    layers: by layer ("embedding", "blocks.0", ...: see LAYERS) and kind (see KINDS). stages: of each rank, its number in the pipeline.
    hidden: communication while the rank computed, which is not in a layer. cpu: CPU time of the thread that trains. delay: the time
    that this thread was ready to run and had no core. The last three are empty if they are not known.
    """

    layers: dict[str, dict[str, Seconds]]
    stages: list[int]
    num_steps: int
    hidden: Seconds = field(default_factory=list)
    cpu: Seconds = field(default_factory=list)
    delay: Seconds = field(default_factory=list)

    @property
    def num_ranks(self) -> int:
        return len(self.stages)

    @property
    def blocks(self) -> list[str]:
        """The names of the blocks, in order."""
        return sorted(
            (name for name in self.layers if name.startswith(BLOCK)), key=lambda name: int(name.removeprefix(BLOCK))
        )

    def of(self, layer: str, kind: str) -> Seconds:
        """The seconds of each rank. "blocks" is the sum of the blocks."""
        if layer == "blocks":
            return _sums(self.num_ranks, (self.of(block, kind) for block in self.blocks))
        return self.layers.get(layer, {}).get(kind, [0.0] * self.num_ranks)

    def of_layer(self, layer: str) -> Seconds:
        """All kinds."""
        return _sums(self.num_ranks, (self.of(layer, kind) for kind in KINDS))

    def of_kind(self, kind: str, layers: Iterable[str] = tuple(LAYERS)) -> Seconds:
        """All layers, or some."""
        return _sums(self.num_ranks, (self.of(layer, kind) for layer in layers))

    @property
    def of_ranks(self) -> Seconds:
        """The step of each rank."""
        return _sums(self.num_ranks, map(self.of_kind, KINDS))

    @property
    def step_s(self) -> float:
        """The mean over the ranks, which end their steps together."""
        return fmean(self.of_ranks)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the arguments."""
        return asdict(self)


def _sums(num_ranks: int, rows: Iterable[Sequence[float]]) -> Seconds:
    total = [0.0] * num_ranks
    for row in rows:
        total = [a + b for a, b in zip(total, row, strict=True)]
    return total


def parts_of(
    steps: Sequence[Sequence[PlaceTimes]],
    stages: Sequence[int],
    cpu: Sequence[Sequence[tuple[float, float]]] = (),
    hidden: Sequence[Sequence[float]] = (),
) -> Parts:
    """The parts of the steps that took a middle time: half of them, at least one.

    steps, cpu, hidden: of each rank, of each of its steps; `cpu` is CPU time and delay. stages: of each rank.

    What a rank spent in a communication longer than the rank of its stage that spent least there, is its wait: ranks that meet leave
    together, so the last one to come spends least. All messages between stages are waits.
    """
    by_time = sorted(range(len(steps[0])), key=lambda step: max(rank[step].total for rank in steps))
    chosen = by_time[len(by_time) // 4 : len(by_time) - len(by_time) // 4]
    kept = [[rank[step] for rank in steps] for step in chosen]
    num_ranks = len(steps)
    layers: dict[str, dict[str, Seconds]] = {}

    def add(layer: str, kind: str, rank: int, seconds: float) -> None:
        row = layers.setdefault(layer, {}).setdefault(kind, [0.0] * num_ranks)
        row[rank] += seconds / len(kept)

    for ranks in kept:
        for rank, times in enumerate(ranks):
            for (layer, kind), seconds in times.computed.items():
                add(layer, kind or "own work", rank, seconds)
            peers = [ranks[other].communicated for other in range(num_ranks) if stages[other] == stages[rank]]
            everyone = [each.communicated for each in ranks]
            for place, seconds in times.communicated.items():
                is_of_stage = (
                    place[1] or place == GRADIENTS
                )  # all ranks take part in the others, such as the sum of the losses
                transfer = 0.0 if place == STAGES else _least(place, peers if is_of_stage else everyone)
                layer = "sums" if place == OTHER else place[0]
                add(layer, "transfer", rank, transfer)
                add(layer, "wait", rank, seconds - transfer)
    return Parts(
        {layer: kinds for layer, kinds in layers.items() if any(any(row) for row in kinds.values())},
        list(stages),
        len(kept),
        hidden=[fmean(rank[step] for step in chosen) for rank in hidden],
        cpu=[fmean(rank[step][0] for step in chosen) for rank in cpu],
        delay=[fmean(rank[step][1] for step in chosen) for rank in cpu],
    )


def _least(place: Place, peers: Sequence[Mapping[Place, float]]) -> float:
    return min(peer.get(place, 0.0) for peer in peers)
