"""Layers that a plan forgets: they meet features that the plan cuts, and torch's error tells shapes, but not which layer it is."""

import dis
import os
import re
import sys
from collections.abc import Collection, Iterator
from math import prod
from types import TracebackType
from typing import Any

import torch
from torch import nn

from mpitrain.tensor.plan import is_within, parent_of

_MOST_NAMES = 5
_TORCH = os.path.dirname(torch.__file__) + os.sep
_SHAPES = re.compile(r"\b(sizes?|shapes?|dim|dims|dimensions?|channels?|elements|features|numel)\b")
"""A word that torch's errors have for shapes that do not fit, and those for memory, devices or dtypes have not."""


class NameForgotten:
    """A forward hook of a cut model, also called after an exception: torch's error for shapes that do not fit gets a hint.

    Such an error tells the length that a layer expects, and the length that it gets. The hook runs once in a forward of the whole
    model, and finds the failed module in the traceback, so that no module pays for it. The error keeps its type and its text. Errors
    of memory, of devices, and of a program's own `raise` stay as they are.

    Args:
        planned: the names of the modules and parameters in the plan.
        lengths: for each length that the plan cuts, that length and the one of this rank's part.
    """

    def __init__(self, planned: Collection[str], lengths: Collection[tuple[int, int]]) -> None:
        self._planned, self._lengths = frozenset(planned), frozenset(lengths)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        error = sys.exception()
        if output is not None or error is None or not _is_of_shapes(error):
            return
        said = str(error)
        for length, part in sorted(self._lengths):
            if _tells(said, length, part) and (hint := self._hint(module, error, length)):
                # A hook cannot replace the error, and a note is not part of its text.
                error.args = (f"{said} - tensor_parallel: {hint} ({part} of {length} on this rank)",)
                return

    def _hint(self, model: nn.Module, error: BaseException, length: int) -> str:
        failed = _failed(model, error)
        if names := self._forgotten(model, failed, length):
            return (
                f"the plan does not name {' or '.join(names)}, where features meet that it cuts; give the layer a style, such as "
                "Style('column') if it makes such features, or Style('row') if it takes them, or let the layer before it gather them "
                "(gathers=True)"
            )
        if failed in self._planned:
            return ""  # it may get a wrong input
        buffers = [name for name, buffer in model.named_buffers() if is_within(name, failed) and length in buffer.shape]
        what = f"has the buffer {' or '.join(buffers[:_MOST_NAMES])}" if buffers else "computes"
        return (
            f"{failed or 'the model'} {what} with {length} features, and the plan cuts them; use this rank's features there, for "
            "example by -1 in a view, or by Style('divide') for a number of heads, or let the layer before it gather them "
            "(gathers=True)"
        )

    def _forgotten(self, model: nn.Module, failed: str, length: int) -> list[str]:
        """The modules and parameters that may be forgotten: the failed layer, else those of this length that are nearest to it."""
        module = model.get_submodule(failed)
        is_layer = type(module).__module__.startswith("torch.nn.") or not any(True for _ in module.children())
        has_own = any(True for _ in module.parameters()) or not any(True for _ in module.buffers())
        if failed and is_layer and has_own and not any(is_within(name, failed) for name in self._planned):
            return [failed]
        while not (found := list(self._unplanned(model, failed, length))) and failed:
            failed = parent_of(failed)
        return found[:_MOST_NAMES]

    def _unplanned(self, model: nn.Module, around: str, length: int) -> Iterator[str]:
        """What is not in the plan and has a parameter with a dimension of this length, in the module `around`: layers, or parameters
        that a module with parts uses itself."""
        for name, part in model.named_modules():
            if not is_within(name, around) or name in self._planned:
                continue
            keys = [key for key, param in part._parameters.items() if param is not None and length in param.shape]
            if keys and not any(True for _ in part.children()):
                yield name
                continue
            paths = (f"{name}.{key}" if name else key for key in keys)
            yield from (path for path in paths if path not in self._planned)


def _failed(model: nn.Module, error: BaseException) -> str:
    """The innermost module whose forward has failed."""
    names = {id(part): name for name, part in model.named_modules()}
    failed = ""
    for traceback in _frames(error):
        failed = names.get(id(traceback.tb_frame.f_locals.get("self")), failed)
    return failed


def _frames(error: BaseException) -> Iterator[TracebackType]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_of_shapes(error: BaseException) -> bool:
    """Whether torch has raised it, for shapes that do not fit. Other types, such as `OutOfMemoryError`, are of something else."""
    if type(error) not in (RuntimeError, AssertionError) or not _SHAPES.search(str(error)):
        return False
    *_, last = _frames(error)
    code = last.tb_frame.f_code
    is_python = code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]  # else a call of torch's library has failed
    return not is_python or code.co_filename.startswith(_TORCH)


def _tells(said: str, length: int, part: int) -> bool:
    """Whether an error is about both lengths, or about numbers of elements that are in their proportion, as that of a view."""
    if view := re.search(r"shape '\[([\d, ]+)\]' is invalid for input of size (\d+)", said):
        return prod(map(int, view[1].split(","))) * part == int(view[2]) * length
    numbers = set(map(int, re.findall(r"\d+", said)))
    numbers |= {prod(map(int, each.split(","))) for each in re.findall(r"\[(\d+(?:, \d+)*)\]", said)}
    return {length, part} <= numbers
