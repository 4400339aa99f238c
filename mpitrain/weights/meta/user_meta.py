"""The `meta` of a program in a checkpoint, beside what mpitrain has there.

Values of JSON are there as they are, for other readers. Any other value, such as a tensor, a NumPy number or a dict with numbers as
keys, is an object {"mpitrain.value": JSON of plain_values.py}, and so is a dict that has this key itself. What JSON takes for a dict, a
list, a number or text, such as a tuple or np.float64, comes back as these.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from ckpt.format.manifest import MAX_META_DEPTH
from mpitrain.weights.meta.parts import SAVED_ONLY
from mpitrain.weights.meta.plain_values import decoded, encoded, small_tensor

RESERVED = ("optimizer", "extra_state", "diloco", "compression", SAVED_ONLY)
"""The keys of what mpitrain has in the meta."""

_OTHER = "mpitrain.value"


def checked(meta: Mapping[str, Any] | None) -> dict[str, Any]:
    """The meta of a program as it is saved. ValueError for keys that mpitrain uses, TypeError for values that cannot come back."""
    if meta is None:
        return {}
    if not isinstance(meta, Mapping):
        raise TypeError(f"meta is a {type(meta).__name__}; expected a dict")
    if taken := [key for key in meta if key in RESERVED]:
        raise ValueError(
            f"meta has {taken}, which mpitrain has there itself; expected other keys than {list(RESERVED)}"
        )
    if odd := [key for key in meta if not isinstance(key, str)]:
        raise TypeError(f"meta has the key {odd[0]!r}; expected text")
    return {key: _as_json(value, f"meta[{key!r}]") for key, value in meta.items()}


def restored(meta: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The program's part of the meta of a checkpoint, as it was given to the save. `device`: of tensors not in host memory."""
    return {key: _from_json(value, device) for key, value in meta.items() if key not in RESERVED}


# Loops, and no comprehensions, which would need twice as many of Python's calls for a deep value.


def _as_json(value: Any, where: str, depth: int = 0) -> Any:
    # A class of the program that JSON takes for a dict, a list, text or a number stays what JSON makes of it.
    if (
        value is None or isinstance(value, str | int | float) or depth > MAX_META_DEPTH
    ):  # ckpt.save says that it is too deep
        return value
    if isinstance(value, list | tuple):
        items = []
        for number, item in enumerate(value):
            items.append(_as_json(item, f"{where}[{number}]", depth + 1))
        return items
    if isinstance(value, Mapping) and not isinstance(value, Counter) and _OTHER not in value and _has_text_keys(value):
        found = {}
        for key, item in value.items():
            found[key] = _as_json(item, f"{where}[{key!r}]", depth + 1)
        return found
    return {_OTHER: encoded(value, where)}


def _has_text_keys(value: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in value)


def _from_json(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        items = []
        for item in value:
            items.append(_from_json(item, device))
        return items
    if not isinstance(value, dict):
        return value
    if value.keys() == {_OTHER}:
        return decoded(value[_OTHER], lambda each: small_tensor(each, device))
    found = {}
    for key, item in value.items():
        found[key] = _from_json(item, device)
    return found
