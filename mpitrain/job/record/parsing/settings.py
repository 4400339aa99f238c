"""The settings of a run, to show them."""

from collections.abc import Mapping
from typing import Any

from collectives.texts import shown
from mpitrain.job.config.secrets import ON_EVENT
from mpitrain.job.record.parsing.lines import MOST_FIGURE
from mpitrain.job.record.parsing.readable import MOST_SEARCHED, Readable

_MOST_SETTINGS, _MOST_NAME = 1000, 200
_MOST_SEARCHED = 4 * MOST_SEARCHED
"""Of all settings; no run has four such lists of shards."""


def flat_settings(document: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a TOML document by their full names, to show them: without secrets and control characters.

    ValueError for more of them than a run can have.
    """
    found: dict[str, Any] = {}
    for name, value in document.items():
        if len(found) > _MOST_SETTINGS:
            break
        found |= {f"{name}.{key}": its for key, its in value.items()} if isinstance(value, dict) else {name: value}
    if len(found) > _MOST_SETTINGS:
        raise ValueError(f"it has more than {_MOST_SETTINGS:,} settings")
    readable: dict[str, Any] = {}
    left = _MOST_SEARCHED
    for name, value in found.items():
        if name != ON_EVENT:  # each with its own limit: the same list is shown the same beside other settings
            text = Readable(searched=(limit := min(MOST_SEARCHED, left)))
            readable[shown(name)[:_MOST_NAME]] = _readable(value, text)
            left -= limit - max(text.left, 0)
    return readable


def _readable(value: Any, text: Readable) -> Any:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, list):
        return [_readable(each, text) for each in value]
    if isinstance(value, dict):
        return {text(name): _readable(each, text) for name, each in value.items()}
    is_odd = isinstance(value, int | float) and not -MOST_FIGURE <= value <= MOST_FIGURE  # such as NaN
    return shown(f"{value:.3g}" if isinstance(value, float) else "too large") if is_odd else value
