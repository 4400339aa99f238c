"""The settings without their secrets: for checkpoints, sinks, reports and messages. RUN/config.toml alone has all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from collectives.secret_forms import HIDDEN, may_have
from collectives.texts import may_have_secrets, without_secrets
from mpitrain.job.config.settings import Config, flat

ON_EVENT = "log.on_event"
"""The setting of a command that may have a secret, such as the address of a web hook."""
CODE = (ON_EVENT, "log.modules")
"""The settings that are code: what they name is run as this user."""
_MOST_SEARCHED = 4_000_000
"""Characters with words that secrets have. To search so many takes a second or two."""


def public(config: Config, hide: Callable[[str], str] = without_secrets) -> Config:
    """The settings without the command of log.on_event, and without the secrets of addresses and other texts: see `without_secrets`.

    `hide`: makes texts public.
    """
    section, _, name = ON_EVENT.partition(".")
    shown: Config = _public(config, hide)
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


class Bounded:
    """`without_secrets` of a stranger's texts: from the first one with which the search would take seconds, HIDDEN stands for each that
    may have a secret."""

    def __init__(self) -> None:
        self._left = _MOST_SEARCHED

    def __call__(self, text: str) -> str:
        """The text to be used."""
        if not may_have_secrets(text):
            return text
        self._left -= len(text) if may_have(text) else len(text) // 4  # an address alone is searched faster
        return HIDDEN if self._left < 0 else without_secrets(text)


def _public(value: Any, hide: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, tuple):
        return tuple(_public(each, hide) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: _public(getattr(value, field.name), hide) for field in fields(value)}
        return replace(value, **changed)
    return value
