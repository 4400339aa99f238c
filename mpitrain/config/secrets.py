"""The settings without their secrets: for checkpoints, sinks, reports and messages. RUN/config.toml alone has all."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from collectives.secret_forms import HIDDEN
from collectives.texts import without_secrets
from mpitrain.config.settings import Config, flat

ON_EVENT = "log.on_event"
"""The setting of a command that may have a secret, such as the address of a web hook."""


def public(config: Config) -> Config:
    """The settings without the command of log.on_event, and without the secrets of addresses and other texts: see `without_secrets`."""
    section, _, name = ON_EVENT.partition(".")
    shown: Config = _public(config)
    return replace(shown, **{section: replace(getattr(shown, section), **{name: None})})


def has_secrets(config: Config) -> bool:
    """Whether `public` leaves something out."""
    return public(config) != config


def hidden(config: Config) -> list[str]:
    """The settings of the data of which `public` has hidden a part: these addresses cannot be reached."""
    return [name for name, value in flat(config).items() if name.startswith("data.") and _is_hidden(str(value))]


def reachable(config: Config) -> Config:
    """The result of `public` without the places of checkpoints of which it has hidden a part. A run's folder has its checkpoints."""
    copies = tuple(place for place in config.checkpoint.copies if not _is_hidden(place))
    resume = "auto" if _is_hidden(config.resume) else config.resume
    return replace(config, checkpoint=replace(config.checkpoint, copies=copies), resume=resume)


def _is_hidden(text: str) -> bool:
    return HIDDEN in text


def _public(value: Any) -> Any:
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, tuple):
        return tuple(map(_public, value))
    if is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: _public(getattr(value, field.name)) for field in fields(value)}
        return replace(value, **changed)
    return value
