"""Texts that people see: control characters as text, and addresses without their secrets. Pure, of the standard library alone: the
supervisor loads this file by its path, on hosts without the packages that the rest of collectives needs."""

import re
import unicodedata
from itertools import pairwise
from urllib.parse import unquote

HIDDEN = "***"
"""Stands for a secret."""
# Each of these patterns takes a time in proportion to the text, whatever the text is.
_ADDRESS = re.compile(r"://\S*")
_NEXT = re.compile(r"(?:(?<=::)|(?<![\w:+.-]))[A-Za-z][\w+.-]*://")  # in zip://a.txt::https://host/b.zip, or in a list
_AUTHORITY = re.compile(r"[^/?#]*")
_QUERY = re.compile(r"(?P<path>[^?#]*)(?:\?(?P<query>[^#]*))?(?:#(?P<fragment>.*))?", re.DOTALL)
_OF_PATH = re.compile(r";([^;/=]*)=([^;/]*)")
_END = ":;,.!?)]}>\"'`"
_CONTAINER = re.compile(r"(?:^|[^\w+.-])(?:abfss?|wasbs?)$", re.IGNORECASE)
"""Schemes of Azure, whose CONTAINER@ACCOUNT is no user."""
_LONGEST_SCHEME = 8
_BUCKETS = re.compile(r"(?:^|[^\w+.-])(?:s3[an]?|gs|gcs|oss)$", re.IGNORECASE)
"""Schemes whose addresses have no port."""
_PORT = re.compile(r"(?P<name>[\w.-]+|\[[0-9A-Fa-f:.]*\]):(?P<port>\d{1,5})")
_USUAL_PORT = re.compile(r"21|22|80|443|[1-9]\d{3,4}")  # other short numbers may begin a password
_NUMERIC = re.compile(r"\d+\.\d+\.\d+\.\d+|localhost|\[[0-9A-Fa-f:.]*\]")
_HOST = re.compile(rf"(?:(?:[\w-]+\.)+[A-Za-z]{{2,}}|{_NUMERIC.pattern})(?::\d+)?")
"""What looks like a host. Names without a dot do not tell."""
_NAMES = (
    "alt date dataset dl download ext file filename format id index lang name num page part partnumber path prefix raw ref "
    "response-content-type rev revision shard size split start subset type version versionid"
)
_OPEN = frozenset(_NAMES.split())
"""Parameters of an address that are no secrets. Whatever else a server calls its key, token or signature stays hidden."""
_JOINERS = "\u00ad\u200c\u200d"  # soft hyphen, zero-width non-joiner and joiner: texts in Persian and emoji have them


def shown(text: str, *, lines: bool = False) -> str:
    r"""The text with escapes, such as \x1b, for characters that a terminal obeys, that cannot be seen, or that are no text.

    Spaces of all scripts and joiners of letters are text. `lines`: line breaks and tabs stay.
    """
    if text.isprintable():
        return text
    kept = _JOINERS + "\n\t" * lines
    return "".join(
        c if c.isprintable() or c in kept or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )


def without_secrets(text: str) -> str:
    """The text with *** in its addresses (SCHEME://...) in place of user and password, of a fragment, and of all parameters but a few
    that are known to be no secrets, such as versionId.

    A password may have any characters but blanks. An @ in the path of an address stays if a host stands before it for certain.
    """
    return _ADDRESS.sub(_public, text) if "://" in text else text


def _public(found: re.Match[str]) -> str:
    rest, begin = found[0], found.start()
    further = _NEXT.finditer(rest, 4) if rest.find("://", 4) > 0 else ()
    places = [0, *(each.end() - 3 for each in further), len(rest)]
    scheme, text = found.string[max(begin - _LONGEST_SCHEME, 0) : begin], ""
    for at, end in pairwise(places):
        text += "://" + _without_user(scheme, rest[at + 3 : end])
        scheme = rest[max(end - _LONGEST_SCHEME, 0) : end]
    return _without_parameters(text)


def _without_user(scheme: str, address: str) -> str:
    """The address without what stands before the host. `scheme`: text that ends with it."""
    authority = _AUTHORITY.match(address)
    assert authority is not None
    end = len(authority[0]) if ":" not in authority[0] else len(address)
    at = address.rfind("@", 0, end)
    if end > len(authority[0]) <= at and _is_of_path(scheme, address, authority[0], at):
        at = authority[0].rfind("@")
    if at < 0 or (":" not in address[:at] and _CONTAINER.search(scheme)):
        return address
    return f"{HIDDEN}{address[at:]}"


def _is_of_path(scheme: str, address: str, authority: str, at: int) -> bool:
    """Whether the last @ of an address, behind its first / ? or #, is no end of a password. It is taken for one if it may be one."""
    user, _, host = authority.rpartition("@")
    port = None if _BUCKETS.search(scheme) else _PORT.fullmatch(host)
    after, slash, _ = address[at + 1 :].partition("/")
    if user:
        return port is not None or _HOST.fullmatch(host) is not None or not slash
    if _NUMERIC.fullmatch(host if port is None else port["name"]):
        return True
    is_port = port is not None and _USUAL_PORT.fullmatch(port["port"]) and address[len(authority)] == "/"
    return bool(is_port) and not (slash and _HOST.fullmatch(after))


def _without_parameters(text: str) -> str:
    address = text.rstrip(_END)  # these are of the sentence, and not of the address
    parts = _QUERY.fullmatch(address)
    assert parts is not None
    public = _OF_PATH.sub(lambda its: ";" + _parameter(its[0][1:]), parts["path"])
    if parts["query"]:
        pieces = re.split("([&;])", parts["query"])
        public += "?" + "".join(piece if at % 2 else _parameter(piece) for at, piece in enumerate(pieces))
    if parts["fragment"]:
        public += f"#{HIDDEN}"
    return public + text[len(address) :]


def _parameter(text: str) -> str:
    name, equals, value = text.partition("=")
    if not text or (equals and name.lower() in _OPEN and not re.search("://|[@%]", unquote(value))):
        return text
    return f"{name}={HIDDEN}" if equals else HIDDEN
