"""Layers that a plan forgets: they meet features that the plan cuts, and torch's error tells shapes, but not which layer it is."""

import re
import sys
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from mpitrain.tensor.plan import is_within, parent_of

_MOST_NAMES = 5


class NameForgotten:
    """A forward hook of a cut model, also called after an exception: torch's error for shapes that do not fit names the layer, too.

    Such an error tells the length that a layer expects, and the length that it gets. The hook runs once in a forward of the whole
    model, and finds the failed module in the traceback, so that no module pays for it.

    Args:
        planned: the names of the modules and parameters in the plan.
        lengths: for each length that the plan cuts, that length and the one of this rank's part.
    """

    def __init__(self, planned: Collection[str], lengths: Collection[tuple[int, int]]) -> None:
        self._planned, self._lengths = frozenset(planned), frozenset(lengths)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        error = sys.exception()
        if output is not None or not isinstance(error, RuntimeError):
            return
        said = str(error)
        numbers = set(map(int, re.findall(r"\d+", said)))
        for length, part in sorted(self._lengths):
            if {length, part} <= numbers and (names := self._forgotten(module, error, length)):
                # A hook cannot replace the error, and a note is not part of its text.
                error.args = (
                    f"tensor_parallel: the plan does not name {' or '.join(names)}, where features meet that it cuts, {part} of "
                    f"{length} on this rank; give the layer a style, such as Style('column') if it makes such features, or "
                    f"Style('row') if it takes them, or let the layer before it gather them (gathers=True). torch says: {said}",
                )
                return

    def _forgotten(self, model: nn.Module, error: BaseException, length: int) -> list[str]:
        """The modules and parameters that may be forgotten: the failed layer, else those of this length that are nearest to it."""
        names = {id(part): name for name, part in model.named_modules()}
        failed, traceback = "", error.__traceback__
        while traceback is not None:
            failed = names.get(id(traceback.tb_frame.f_locals.get("self")), failed)
            traceback = traceback.tb_next
        if failed and not any(True for _ in model.get_submodule(failed).children()) and failed not in self._planned:
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
