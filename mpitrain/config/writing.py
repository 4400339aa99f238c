"""Settings as text: TOML that reads back as the same, and what differs between two."""

from __future__ import annotations

import json
from typing import Any

from mpitrain.config.settings import Config, flat


def to_toml(config: Config) -> str:
    """The settings as TOML, from which `from_toml` and `parse` make the same again. What is unset is left out."""
    sections: dict[str, list[str]] = {}
    for name, value in flat(config).items():
        section, _, key = name.rpartition(".")
        if value is not None:
            sections.setdefault(section, []).append(f"{key} = {text_of(value)}")
    return "\n\n".join("\n".join([f"[{name}]", *lines] if name else lines) for name, lines in sections.items()) + "\n"


def differences(a: Config, b: Config) -> list[str]:
    """What changes from `a` to `b`, one line per setting: `optim.lr: 0.001 -> 0.002`."""
    after = flat(b)
    return [f"{k}: {text_of(v)} -> {text_of(after[k])}" for k, v in flat(a).items() if v != after[k]]


def text_of(value: Any) -> str:
    """A value as TOML writes it."""
    if value is None:
        return "none"  # in `differences` alone: TOML has no such value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(text_of(v) for v in value)}]"
    return repr(value)
