"""What the supervisor prints, by `collectives.texts` without the packages that `collectives` needs."""

import contextlib
import sys

from mpitrain.files import load_alone

for name in ("secret_tokens", "secret_forms", "addresses", "texts"):  # each imports those before it
    load_alone(name)
from collectives.texts import shown, without_secrets  # noqa: E402


def public(text: str, *, lines: bool = False) -> str:
    """The text for people: without secrets in addresses, and with escapes for control characters; see `collectives.texts.shown`."""
    return shown(without_secrets(text), lines=lines)


def say(line: str, text: str = "") -> None:
    """A line of the supervisor, and further text that is `public`. A terminal that was closed must not end it."""
    with contextlib.suppress(OSError):
        print(f"elastic: {public(line)}", *([text] if text else []), sep="\n", file=sys.stderr, flush=True)
