"""`shown` and `without_secrets` of `collectives.texts`, without the packages that `collectives` needs."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collectives import texts as _texts
else:
    from mpitrain.files import loaded

    _texts = loaded("texts")


def public(text: str, *, lines: bool = False) -> str:
    """The text for people: without secrets in addresses, and with escapes for control characters; see `collectives.texts.shown`."""
    return _texts.shown(_texts.without_secrets(text), lines=lines)
