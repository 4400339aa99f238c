"""Loads weights from files into a model: each rank reads its own boxes."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn

from mpitrain.placement.rank0 import on_rank0
from mpitrain.weights.targets import Target, begin, fill, targets_of
from mpitrain.weights.whole.files import FileTensor, Rename, find, opened, some


class Loaded(NamedTuple):
    """Names that `load_weights(strict=False)` ignored: names that only the model has, and names that only the files have."""

    missing: list[str]
    unexpected: list[str]


@torch.no_grad()
def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    strict: bool = True,
    rename: Rename | None = None,
) -> Loaded:
    """Fill a model, sharded or not, with pretrained weights from safetensors files. Collective, between two steps.

    Each rank reads only its own rows of each parameter. All ranks must see the files under the same path. Values are cast to the
    model's dtypes. Of tied weights the files need only one.

    Args:
        path: a file, several, or a folder with `model.safetensors` or `model.safetensors.index.json`.
        strict: names that only the model or only the files have are an error.
        rename: from the files' names to the model's: a function, or a mapping, which keeps the names that it does not have.
            None as the new name drops a tensor.

    Raises:
        ValueError: on all ranks, before any change: names that do not fit, other shapes, other kinds of numbers (int8 for floats),
            damaged files, a URL as `path`.
        OSError: on all ranks, before any change: files that are missing or cannot be read.
        RuntimeError: in the middle of a step or within `unshard`.
    """
    comm = begin(model, "load_weights")
    targets = targets_of(model)
    entries, passed_over = on_rank0(comm, lambda: _planned(targets, find(path, rename), strict), "load_weights")
    with ExitStack() as files:
        views: list[Any] = []
        with comm.together("load_weights"):
            contents: dict[str, Any] = {}
            for target, entry in zip(targets, entries, strict=True):
                views.append(None)
                if entry is None or (target.pieces is not None and not target.pieces):
                    continue
                if target.tensor.is_meta and isinstance(target.tensor, nn.Parameter):
                    raise ValueError(
                        f"{target.names[0]} is on the meta device and has no memory; call to_empty() first"
                    )
                if entry.file not in contents:
                    contents[entry.file] = files.enter_context(opened(entry.file))
                views[-1] = contents[entry.file].get_slice(entry.name)
                if tuple(views[-1].get_shape()) != entry.shape:
                    raise ValueError(
                        f"{entry.file} is another file here than on rank 0: {entry.name} has another shape"
                    )
        with comm.together("load_weights"):  # an input/output error cannot be checked earlier
            for target, entry, view in zip(targets, entries, views, strict=True):
                if view is not None and entry is not None:
                    _fill(target, contents[entry.file], entry, view, model)
    return passed_over


def _planned(
    targets: list[Target], found: dict[str, FileTensor], strict: bool
) -> tuple[list[FileTensor | None], Loaded]:
    """For each target the tensor in the files from which it is read."""
    entries = [next((found[name] for name in target.names if name in found), None) for target in targets]
    known = {name for target in targets for name in target.names}
    missing = [target.names[0] for target, entry in zip(targets, entries, strict=True) if entry is None]
    unexpected = [name for name in found if name not in known]
    if strict and (missing or unexpected):
        raise ValueError(
            f"the files lack {some(missing)} and have {some(unexpected)} that the model does not have; "
            "rename= maps their names to the model's, strict=False loads the others"
        )
    for target, entry in zip(targets, entries, strict=True):
        if entry is None:
            continue
        if entry.shape != target.shape:
            raise ValueError(f"{target.names[0]} has shape {entry.shape} in {entry.file}; expected {target.shape}")
        if _kind(entry.dtype) != _kind(target.tensor.dtype):
            raise ValueError(f"{target.names[0]} is {entry.dtype} in {entry.file}, {target.tensor.dtype} in the model")
    return entries, Loaded(missing, unexpected)


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


def _fill(target: Target, content: Any, entry: FileTensor, view: Any, model: nn.Module) -> None:
    """Copy this rank's boxes from the pages of the mapped file, without a buffer."""
    fill(model, target, lambda place: view[place] if place else content.get_tensor(entry.name))
