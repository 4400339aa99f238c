"""Texts that people see: control characters as text, and addresses without their secrets. Pure, of the standard library alone."""

import re

HIDDEN = "***"
"""Stands for a secret."""
_USER = re.compile(r"://[^/?#\s]*@")
_REST = re.compile(
    r"://\S*"
)  # of an address. Each of these patterns takes a time in proportion to the text, whatever the text is
_QUERY = re.compile(r"(?P<path>[^?#]*)(?:\?(?P<query>[^#]*))?(?:#(?P<fragment>.*))?", re.DOTALL)
_END = ":;,.!?)]}>\"'`"
_OPEN = frozenset(
    (
        *(
            "alt",
            "date",
            "dataset",
            "dl",
            "download",
            "ext",
            "file",
            "filename",
            "format",
            "id",
            "index",
            "lang",
            "name",
            "num",
        ),
        *(
            "page",
            "part",
            "partnumber",
            "path",
            "prefix",
            "raw",
            "ref",
            "response-content-type",
            "rev",
            "revision",
            "shard",
        ),
        *("size", "split", "start", "subset", "type", "version", "versionid"),
    )
)
"""Parameters of an address that are no secrets. Whatever else a server calls its key, token or signature stays hidden."""


def shown(text: str, *, lines: bool = False) -> str:
    r"""The text with escapes, such as \x1b, for characters that a terminal obeys, that cannot be seen, or that are no text.

    `lines`: line breaks and tabs stay.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def without_secrets(text: str) -> str:
    """The text with *** in its addresses (SCHEME://...) in place of user and password, of a fragment, and of all parameters but a few
    that are known to be no secrets, such as versionId."""
    if "://" not in text:
        return text
    return _REST.sub(_without_parameters, _USER.sub(f"://{HIDDEN}@", text))


def _without_parameters(found: re.Match[str]) -> str:
    address = found[0].rstrip(_END)  # these are of the sentence, and not of the address
    parts = _QUERY.fullmatch(address)
    assert parts is not None
    text = parts["path"]
    if parts["query"]:
        pieces = re.split("([&;])", parts["query"])
        text += "?" + "".join(piece if at % 2 else _parameter(piece) for at, piece in enumerate(pieces))
    if parts["fragment"]:
        text += f"#{HIDDEN}"
    return text + found[0][len(address) :]


def _parameter(text: str) -> str:
    name, equals, _ = text.partition("=")
    if not text or (equals and name.lower() in _OPEN):
        return text
    return f"{name}={HIDDEN}" if equals else HIDDEN
