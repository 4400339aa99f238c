"""Texts that people see: control characters as text, bytes with units, and without secrets: passwords and signatures of addresses,
tokens, keys.

Pure, of the standard library alone, like `addresses.py`, `secret_forms.py` and `secret_tokens.py`: the supervisor loads these files
without the package (`mpitrain.files.load_alone`), on hosts without what the rest of collectives needs.
"""

import re
import unicodedata
from urllib.parse import unquote

from collectives.addresses import without_packed, without_users
from collectives.secret_forms import HIDDEN, hidden, may_have

_BETWEEN_PARTS = re.compile("[:/?#&;=@]")
_JOINERS = "\u00ad\u200c\u200d"  # soft hyphen, zero-width non-joiner and joiner: texts in Persian and emoji have them


class _Shown(dict[int, str]):
    """What is printed for the characters that were asked for. A text of a stranger may have any number of any of them."""

    def __init__(self, kept: str) -> None:
        self._kept = kept

    def __missing__(self, code: int) -> str:
        if len(self) > 10_000:
            self.clear()
        char = chr(code)
        is_text = char.isprintable() or char in self._kept or unicodedata.category(char) == "Zs"
        self[code] = char if is_text else char.encode("unicode_escape").decode()
        return self[code]


_SHOWN, _SHOWN_LINES = _Shown(_JOINERS), _Shown(_JOINERS + "\n\t")


def shown(text: str, *, lines: bool = False) -> str:
    r"""The text with escapes, such as \x1b, for characters that a terminal obeys, that cannot be seen, or that are no text.

    Spaces of all scripts and joiners of letters are text. `lines`: line breaks and tabs stay.
    """
    return text if text.isprintable() else text.translate(_SHOWN_LINES if lines else _SHOWN)


def without_secrets(text: str, of: str = "") -> str:
    """The text with *** in place of secrets.

    In addresses (SCHEME://...) these are user and password, and all parameters but a few that are known to be no secrets, such as
    versionId; with http also the fragment. Elsewhere: tokens and keys of a known form, the values of names such as
    AWS_SECRET_ACCESS_KEY and password, and headers with an authorization.

    A password may have any characters, blanks if the address is all of the text or stands in quotes. An @ in the path of an address
    stays if a host stands before it for certain.

    Args:
        of: an address. What is hidden of it is hidden wherever it stands in the text: libraries repeat parts of an address.
    """
    text = hidden(without_packed(without_users(text), without_secrets))
    if parts := _hidden_parts(of):
        text = re.sub(rf"(?<![\w-])(?:{'|'.join(map(re.escape, parts))})(?![\w-])", HIDDEN, text)
    return text


def _hidden_parts(address: str) -> list[str]:
    """The parts of an address that are not shown, as they stand there and decoded, the longest first."""
    public = without_secrets(address) if address else address
    if public == address:
        return []
    user = address.partition("://")[2].rpartition("@")[0] if f"://{HIDDEN}@" in public else ""
    shown_parts = set(_BETWEEN_PARTS.split(public))
    others = [part for part in _BETWEEN_PARTS.split(address) if part not in shown_parts]
    of_user = {user, *_BETWEEN_PARTS.split(user)} - shown_parts
    # Short parameters such as sv=403 are words of messages.
    parts = {part for part in of_user if len(part) > 2} | {part for part in others if len(part) > 7}
    return sorted({each for part in parts for each in (part, unquote(part))}, key=len, reverse=True)


def may_have_secrets(text: str) -> bool:
    """Whether `without_secrets` looks at more of the text than single words. If not, none of its parts has a secret either."""
    return "://" in text or "%" in text or may_have(text)


def show_bytes(nbytes: float) -> str:
    """1536 as '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"
