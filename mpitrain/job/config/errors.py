"""The errors of wrong settings, and the check of a number's range."""

from __future__ import annotations

import math


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type or out of range. Its message is one line for the user."""


class FolderInUseError(ConfigError):
    """Another job trains in the run's folder. The same settings may work later."""


def expect(name: str, value: float | None, least: float, *, most: float = math.inf, below: float = math.inf) -> None:
    """Raise ConfigError unless the value is unset or a finite number in the range."""
    if value is None or (math.isfinite(value) and least <= value <= most and value < below):
        return
    limit = f" and at most {most}" if most < math.inf else f" and less than {below}" if below < math.inf else ""
    raise ConfigError(f"{name}: expected at least {least}{limit}, got {value}")
