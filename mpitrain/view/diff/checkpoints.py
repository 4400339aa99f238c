"""The differences of two checkpoints that training has saved, and the checkpoints that two runs have."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ckpt.check.comparing import MetaDifference, TensorDifference
from ckpt.check.comparing import compare as compare_all
from ckpt.commands.terminal import shown_progress
from ckpt.format.manifest import FILE_NAME
from ckpt.reading.checkpoint import Checkpoint, open_checkpoint
from collectives.texts import shown
from mpitrain.job.record.conditions import Condition, differing, of_checkpoint
from mpitrain.job.record.parsing.words import counted

_OF_CONDITIONS = {"config", "num_ranks", "collectives", "hardware", "wires", "lease", "lease_run"}
"""Keys of the meta that tell of the conditions of a run. The others are a part of its state."""
_GENERATORS = "random/states"
"""A row for each rank, so the ranks and what they do decide the values."""


class CheckpointDifference(NamedTuple):
    """The comparison of two checkpoints."""

    name: str
    a: str
    b: str
    conditions: list[Condition]
    tensors: list[TensorDifference]
    """Those that differ, the model's first."""
    only_a: list[str]
    only_b: list[str]
    meta: list[MetaDifference]
    """Differences of the state that is no tensor, such as the position in the data."""
    num_compared: int
    left_out: str
    """A tensor that is not compared, and why; or empty."""

    @property
    def num_seen(self) -> int:
        """Tensors that one of them or both have, without `left_out`."""
        return self.num_compared + len(self.only_a) + len(self.only_b)

    def __bool__(self) -> bool:
        return bool(self.tensors or self.only_a or self.only_b or self.meta)


def common_names(a: Path, b: Path) -> list[str]:
    """The names of the checkpoints that both runs have, in the order of steps."""
    folders = [run / "checkpoints" for run in (a, b)]
    names = [{each.name for each in folder.glob("[!.]*") if each.is_dir()} for folder in folders]
    # If one has lost its manifest, it is damaged, and no folder of something else.
    found = [name for name in names[0] & names[1] if any((folder / name / FILE_NAME).exists() for folder in folders)]
    return sorted(found, key=_natural)


def heading(checkpoint: Checkpoint) -> str:
    """What is known of a checkpoint and of the ranks that saved it, in a line."""
    meta = checkpoint.meta
    hardware = of_checkpoint(meta, checkpoint.num_ranks).hardware
    ranks, threads, device = (hardware.get(name) for name in ("ranks", "threads", "device"))
    words = [f"step {meta['step']:,}"] if isinstance(meta.get("step"), int) else []
    words.append(counted(ranks, "rank") if ranks else "number of ranks unknown")
    if threads is not None:
        words[-1] += f" with {counted(threads, 'thread')} each"
    if device is not None:
        words.append("CPU" if device == "cpu" else device)
    versions = [f"{name} {hardware[name]}" for name in ("torch", "numpy") if name in hardware]
    return " · ".join([*words, *([", ".join(versions)] if versions else [])])


def compare_runs(a: Path, b: Path, only: Sequence[str] | None) -> tuple[list[CheckpointDifference], list[str]]:
    """Compare the checkpoints that both runs have, up to the first that differs; returns also the names of later ones.

    With `only`, checkpoints without such tensors are left out.
    """
    names = common_names(a, b)
    compared: list[CheckpointDifference] = []
    for number, name in enumerate(names, 1):
        in_a, in_b = (open_checkpoint(run / "checkpoints" / name) for run in (a, b))
        found = compare(in_a, in_b, only)
        if only and not found.num_seen:
            continue
        compared.append(found)
        if found:
            return compared, names[number:]
    return compared, []


def compare(a: Checkpoint, b: Checkpoint, only: Sequence[str] | None) -> CheckpointDifference:
    """Compare two checkpoints, in a few tens of MiB of memory. `only`: as in `ckpt.check.comparing`. CheckpointError for damage."""
    conditions = differing(*(of_checkpoint(each.meta, each.num_ranks) for each in (a, b)))
    with shown_progress(f"comparing {a.path.name}", a.nbytes) as progress:
        found = compare_all(a, b, only=only, progress=progress)
    tensors, num, left_out = found.tensors, found.num_compared, ""
    if any(each.name == "ranks" or each.name.startswith("parallel.") for each in conditions) and any(
        each.name == _GENERATORS for each in tensors
    ):
        tensors = [each for each in tensors if each.name != _GENERATORS]
        left_out = f"{_GENERATORS}, the states of the ranks' generators, as ranks or layout differ"
        num -= 1
    return CheckpointDifference(
        name=shown(a.path.name if a.path.name == b.path.name else f"{a.path.name} and {b.path.name}"),
        a=str(a.path),
        b=str(b.path),
        conditions=conditions,
        tensors=sorted(tensors, key=lambda each: _place(each.name)),
        only_a=sorted(found.only_a, key=_place),
        only_b=sorted(found.only_b, key=_place),
        meta=[each for each in found.meta if re.split(r"[.\[]", each.key)[0] not in _OF_CONDITIONS],
        num_compared=num,
        left_out=left_out,
    )


def _place(name: str) -> tuple[bool, list[tuple[int, str]]]:
    return not name.startswith("model/"), _natural(name)


def _natural(name: str) -> list[tuple[int, str]]:
    """A key of order in which blocks.2 comes before blocks.10."""
    parts = re.split(r"(\d+)", name)
    return [(len(part.lstrip("0")), part.lstrip("0")) if part.isdecimal() else (-1, part) for part in parts]
