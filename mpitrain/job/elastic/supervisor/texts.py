"""`shown` and `without_secrets` of `collectives.texts`, without the packages that `collectives` needs."""

from mpitrain.files import load_alone

for name in ("secret_tokens", "secret_forms", "addresses", "texts"):  # each imports those before it
    load_alone(name)
from collectives.texts import shown, without_secrets  # noqa: E402


def public(text: str, *, lines: bool = False) -> str:
    """The text for people: without secrets in addresses, and with escapes for control characters; see `collectives.texts.shown`."""
    return shown(without_secrets(text), lines=lines)
