"""Layers that a plan forgets: they meet features that the plan cuts, and torch's error tells shapes, but not which layer it is."""

import re
import sys
from collections.abc import Collection, Iterator
from math import prod
from typing import Any

from torch import nn

from mpitrain.tensor.errors import drop_rules, frames, is_of_shapes
from mpitrain.tensor.plan import is_within, parent_of

_MOST_NAMES = 5
_VIEW = re.compile(r"shape '\[([\d, ]+)\]' is invalid for input of size (\d+)")
_NO_LENGTHS = re.compile(r"[a-zA-Z]{2,}\d+|\b(dimension|operand|number) \d+")
"""Numbers in torch's errors that count something: mat1, batch2, dimension 1."""
_STYLES = "Style('column') if it makes such features, or Style('row') if it takes them"


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
        if output is not None or error is None or not is_of_shapes(error):
            return
        said = str(error)
        found = (
            f"{hint} ({part} of {length} on this rank)"
            for tells, hint_of in ((_tells, self._hint), (_tells_proportion, self._hint_of_siblings))
            for length, part in sorted(self._lengths)
            if tells(said, length, part) and (hint := hint_of(module, error, length))
        )
        if told := next(found, None):
            # A hook cannot replace the error, and a note is not part of its text.
            error.args = (f"{said} - tensor_parallel: {told}",)
            drop_rules(error)

    def _hint(self, model: nn.Module, error: BaseException, length: int) -> str:
        failed = _failed(model, error)
        if names := self._forgotten(model, failed, length):
            return (
                f"the plan does not name {' or '.join(names)}, where features meet that it cuts; give the layer a style, such as "
                f"{_STYLES}, or let the layer before it gather them (gathers=True)"
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

    def _hint_of_siblings(self, model: nn.Module, error: BaseException, length: int) -> str:
        """For an error of numbers of heads, or of others in the proportion of the cut features: layers beside those that are cut."""
        around = _failed(model, error)
        while around and not any(is_within(name, around) for name in self._planned):
            around = parent_of(around)
        names = list(self._unplanned(model, around, length))[:_MOST_NAMES]
        if not names or around in self._planned:
            return ""
        return (
            f"the plan cuts layers of {around or 'the model'}, and does not name {' or '.join(names)}; if such features meet, give the "
            f"layer a style, such as {_STYLES}"
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
    for traceback in frames(error):
        failed = names.get(id(traceback.tb_frame.f_locals.get("self")), failed)
    return failed


def _tells(said: str, length: int, part: int) -> bool:
    """Whether an error is about both lengths, or about numbers of elements that are in their proportion, as that of a view."""
    if view := _VIEW.search(said):
        return prod(map(int, view[1].split(","))) * part == int(view[2]) * length
    return {length, part} <= _numbers(said)


def _tells_proportion(said: str, length: int, part: int) -> bool:
    """Whether an error is about two numbers in the proportion of both lengths, such as numbers of heads."""
    numbers = set() if _VIEW.search(said) else _numbers(said)
    return any(one * part == other * length for one in numbers for other in numbers if one != other)


def _numbers(said: str) -> set[int]:
    """The lengths in an error, and the products of the lists in it."""
    said = _NO_LENGTHS.sub("", said)
    lists = re.findall(r"\[(\d+(?:, \d+)*)\]", said)
    return {*map(int, re.findall(r"\d+", said)), *(prod(map(int, each.split(","))) for each in lists)} - {0}
