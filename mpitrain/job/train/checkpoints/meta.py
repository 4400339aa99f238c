"""The meta of the main job's checkpoints, with types: a checkpoint of a stranger may have anything there. Without torch."""

import os
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

import ckpt
from ckpt.format.validation import converted
from collectives.texts import without_secrets
from mpitrain.job.config.parallel import Wire

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
_Share = Annotated[float, msgspec.Meta(gt=0, lt=1e300)]


class _Data(msgspec.Struct):
    fingerprint: str
    next_sample: Count
    documents: dict[str, Any] = {}  # `DocumentBatches.shapes` checks it


class _Wires(msgspec.Struct):
    num_nodes: Count = 0
    wire: Wire = "fp32"
    wire_weights: Wire = "fp32"


class _Scaler(msgspec.Struct):
    scale: _Share
    good_steps: Count
    skipped_steps: Count


class _Stepper(msgspec.Struct):
    skipped: Count = 0
    skipped_in_a_row: Count = 0
    scaler: _Scaler | msgspec.UnsetType = msgspec.UNSET


_Window = Annotated[list[float], msgspec.Meta(max_length=1 << 10)]


class _Health(msgspec.Struct):
    left_out: Annotated[list[tuple[Count, Count]], msgspec.Meta(max_length=1 << 16)] = []
    rewinds: Count = 0
    windows: tuple[_Window, _Window] = ([], [])


class _Meta(msgspec.Struct):
    step: Count
    config: str
    num_ranks: _Ranks
    data: _Data
    wires: _Wires = msgspec.field(default_factory=_Wires)
    stepper: _Stepper = msgspec.field(default_factory=_Stepper)
    health: _Health = msgspec.field(default_factory=_Health)


_EXPECTED = ("step", "config", "num_ranks", "data")


def checked(meta: dict[str, Any], where: object) -> dict[str, Any]:
    """The same meta. ckpt.CheckpointError if it is not of the main job, or has values that no run writes."""
    missing = [key for key in _EXPECTED if key not in meta]
    if missing:
        raise ckpt.CheckpointError(
            f"{where} was not written by the main job: its meta lacks {', '.join(missing)}; "
            "load it with mpitrain.load or ckpt.load"
        )
    try:
        converted(meta, _Meta)
    except ValueError as error:
        raise ckpt.CheckpointError(f"{where}: its meta has what no run writes: {error}") from None
    return meta


def read_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The meta of a checkpoint of the main job. ckpt.CheckpointError if it cannot be read, or is not of the main job."""
    return checked(ckpt.open(path).meta, without_secrets(os.fspath(path)))


class Age(NamedTuple):
    """When a checkpoint was saved: the id of the elastic run, "" if it was not elastic, the number of its lease, and the steps done."""

    run: str = ""
    lease: int = 0
    step: int = 0


class _OfAge(msgspec.Struct):
    lease_run: str = ""
    lease: Count = 0
    step: Count = 0


def age_of(start: Path | ckpt.Url | None) -> Age:
    """The age of a checkpoint. Age() without one, or if it cannot be read: a load then reports the error."""
    try:
        found = converted({} if start is None else ckpt.open(start).meta, _OfAge)
    except ValueError:
        return Age()
    return Age(found.lease_run, found.lease, found.step)


class _OfWires(msgspec.Struct):
    wires: _Wires = msgspec.field(default_factory=_Wires)
    num_ranks: Count = 0


def wires_of(start: Path | ckpt.Url | None, num_ranks: int, num_nodes: int) -> dict[str, Wire]:
    """The formats of a checkpoint that was saved on these numbers of ranks and nodes, by setting; empty without one."""
    try:
        found = converted({} if start is None else ckpt.open(start).meta, _OfWires)
    except ValueError:  # loading the checkpoint reports the error, or reads a copy
        return {}
    if (found.num_ranks, found.wires.num_nodes) != (num_ranks, num_nodes):
        return {}
    return {"wire": found.wires.wire, "wire_weights": found.wires.wire_weights}
