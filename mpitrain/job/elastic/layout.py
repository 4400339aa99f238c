"""The layout of a run on the ranks that a loss has left."""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple


class Layout(NamedTuple):
    """The sizes of the axes, and the number of ranks that have no place in them."""

    axes: dict[str, int]
    num_idle: int

    @property
    def num_used(self) -> int:
        return prod(size for name, size in self.axes.items() if name != "ep")


_OF_MODEL = ("tp", "cp", "pp")  # the axes that divide a copy of the model, in the order in which they are kept


def next_layout(
    axes: Mapping[str, int], ranks: int, *, batches: int | None = None, whole_copies: bool = False
) -> Layout:
    """The layout of a run with the layout `axes` when `ranks` ranks are left: it uses as many of them as it can.

    `axes`: sizes of pp, dp_replicate, dp_shard, cp, tp and ep; an axis that is missing has size 1. The axes tp, cp and pp stay as long
    as one copy of the model has place; then they become divisors of their sizes, and tp stays longest. dp_shard takes what is left.
    dp_replicate and ep become the largest divisors that fit. `batches`: a number that dp_replicate x dp_shard must divide if there is a
    pipeline, whose micro-batches have one size. `whole_copies`: dp_shard stays, too, and dp_replicate becomes the number of copies that
    have place; if none has, the rest holds as without it. ValueError if `ranks` is less than 1.

        next_layout({"tp": 2, "dp_shard": 2}, 3)  ->  tp 2, dp_shard 1, one rank idle
    """
    if ranks < 1:
        raise ValueError(f"next_layout: {ranks} ranks; expected at least 1")
    sizes = {name: axes.get(name, 1) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
    if whole_copies and (kept := _whole_copies(sizes, ranks, batches)) is not None:
        return kept
    best = max(
        (
            {"tp": tp, "cp": cp, "pp": pp}
            for tp in _divisors(sizes["tp"])
            for cp in _divisors(sizes["cp"])
            for pp in _divisors(sizes["pp"])
        ),
        key=lambda each: _preference(each, sizes, ranks),
    )
    data = ranks // prod(best.values())
    if best["pp"] > 1 and batches is not None:
        data = max((each for each in _divisors(batches) if each <= data), default=1)
    replicate = max(each for each in _divisors(sizes["dp_replicate"]) if data % each == 0)
    shard = data // replicate
    expert = max(each for each in _divisors(sizes["ep"]) if shard * best["cp"] % each == 0)
    chosen = {
        "pp": best["pp"],
        "dp_replicate": replicate,
        "dp_shard": shard,
        "cp": best["cp"],
        "tp": best["tp"],
        "ep": expert,
    }
    return Layout(chosen, ranks - data * prod(best.values()))


def _whole_copies(sizes: Mapping[str, int], ranks: int, batches: int | None) -> Layout | None:
    """As many copies of the model as have place, each on as many ranks as before; None if not even one has place."""
    of_copy = {name: size for name, size in sizes.items() if name not in ("dp_replicate", "ep")}
    fitting = [
        num
        for num in range(1, min(ranks // prod(of_copy.values()), sizes["dp_replicate"]) + 1)
        if sizes["pp"] == 1 or batches is None or batches % (num * sizes["dp_shard"]) == 0
    ]
    if not fitting:
        return None
    return Layout({**sizes, "dp_replicate": fitting[-1]}, ranks - fitting[-1] * prod(of_copy.values()))


def _preference(
    model: Mapping[str, int], sizes: Mapping[str, int], ranks: int
) -> tuple[bool, bool, int, tuple[int, ...]]:
    """A greater value for a better division of the model."""
    used = prod(model.values())
    fits, is_kept = used <= ranks, all(model[name] == sizes[name] for name in _OF_MODEL)
    return fits, is_kept, ranks // used * used if fits else -used, tuple(model[name] for name in _OF_MODEL)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
