"""The constants of a machine file as plain data, and their text. Without torch and MPI."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Value = str | bool | int | float | Sequence[float] | Sequence[Sequence[float]]


class MeasuredConstant(NamedTuple):
    """A value of a machine file, and how it was measured."""

    value: Value
    how: str


Sections = Mapping[str, Mapping[str, MeasuredConstant]]
"""The constants by section and key. The section "" stands before the others, and has no name in the file."""


def to_toml(sections: Sections, header: str) -> str:
    """The text of a machine file: `header` and the origin of each constant as comments."""
    lines = [*_commented(header)]
    for name, constants in sections.items():
        lines += ["", f"[{name}]"] if name else [""]
        for key, constant in constants.items():
            lines += [*_commented(constant.how), f"{key} = {to_text(constant.value)}"]
    return "\n".join(lines) + "\n"


def _commented(text: str) -> list[str]:
    return [f"# {line}" for line in text.splitlines()]


def to_text(value: Value) -> str:
    """A value as TOML. Four digits are more than a measurement gives; whole numbers are exact."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        text = f"{value:.4g}"
        return text if "." in text or "e" in text else f"{text}.0"  # without either, TOML has a whole number
    return f"[{', '.join(map(to_text, value))}]"
