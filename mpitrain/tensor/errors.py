"""Errors in the forward of a cut model: which of them are of shapes, and the rules of a region, which explain some of them."""

import dis
import os
import re
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn

_TORCH = os.path.dirname(torch.__file__) + os.sep
_SHAPES = re.compile(r"\b(sizes?|shapes?|dim|dims|dimensions?|channels?|elements|features|numel)\b")
"""A word that torch's errors have for shapes that do not fit, and those for memory, devices or dtypes have not."""
_IN_PLACE = re.compile(r"\bin-?place\b")
_RULES = "is a region of tensor_parallel."


def explain(name: str, is_cut: bool, module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook of a region, also called after an exception: adds to torch's own error the rules of a region that it may break.

    `is_cut`: after the row layer of the region each rank has its own tokens.
    """
    error = sys.exception()
    if output is not None or not isinstance(error, RuntimeError):
        return
    rules = ["It gets all tokens, and must not write to its input in place."] if _IN_PLACE.search(str(error)) else []
    if is_cut and is_of_shapes(error):
        rules.append(
            "After its row layer, with sequence parallelism, it has this rank's tokens alone. A residual connection belongs in a "
            "module around it."
        )
    if rules:
        error.add_note(f"{name or 'The model'} {_RULES} {' '.join(rules)}")


def drop_rules(error: BaseException) -> None:
    """Remove what `explain` has added: something else explains the error."""
    notes = getattr(error, "__notes__", [])
    notes[:] = [note for note in notes if _RULES not in note]


def is_of_shapes(error: BaseException) -> bool:
    """Whether torch has raised it, for shapes that do not fit. Other types, such as `OutOfMemoryError`, are of something else."""
    if type(error) not in (RuntimeError, AssertionError) or not _SHAPES.search(str(error)):
        return False
    *_, last = frames(error)
    code = last.tb_frame.f_code
    is_python = code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]  # else a call of torch's library has failed
    return not is_python or code.co_filename.startswith(_TORCH)


def frames(error: BaseException) -> Iterator[TracebackType]:
    """The calls that an error has left, the outermost first."""
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
