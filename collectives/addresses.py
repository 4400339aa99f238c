"""Addresses, SCHEME://HOST/PATH, without their secrets: users, passwords, signatures and other parameters.

Pure, of the standard library alone: see `texts.py`.
"""

import re
from collections.abc import Callable
from itertools import pairwise
from urllib.parse import unquote

from collectives.secret_forms import HIDDEN

# Each of these patterns takes a time in proportion to the text, whatever the text is.
_ADDRESS = re.compile(r"://\S*")
_NEXT = re.compile(r"(?:(?<=::)|(?<![\w:+.-]))[A-Za-z][\w+.-]*://")  # in zip://a.txt::https://host/b.zip, or in a list
_AUTHORITY = re.compile(r"[^/?#]*")
_QUERY = re.compile(r"(?P<path>[^?#]*)(?:\?(?P<query>[^#]*))?(?P<fragment>#.*)?", re.DOTALL)
_QUERY_OF_STORE = re.compile(r"(?P<path>(?:[^?#]|[?#](?![\w.-]+=))*)(?:[?#](?P<query>.*))?(?P<fragment>)", re.DOTALL)
"""Keys of stores and names of files may have ? and # as letters."""
_OF_PATH = re.compile(r";([^;/=]*)=([^;/]*)")
_END = ":;,.!?)]}>\"'`"
_SCHEME = r"(?:^|[^\w+.-])(?:%s)$"  # at the end of the text before ://
_CONTAINER = re.compile(_SCHEME % "abfss?|wasbs?", re.IGNORECASE)
"""Schemes of Azure, whose CONTAINER@ACCOUNT is no user."""
_LONGEST_SCHEME = 8
_BUCKET_SCHEMES = "s3[an]?|gs|gcs|oss"
_BUCKETS = re.compile(_SCHEME % _BUCKET_SCHEMES, re.IGNORECASE)
"""Schemes whose addresses have no port."""
_OTHER_STORES = "az|adl|abfss?|wasbs?|r2|b2|cos|obs|tos|hf|file|local|memory|hdfs|viewfs|webhdfs|dbfs|sftp|ssh|ftp|smb"
_STORES = re.compile(_SCHEME % f"{_BUCKET_SCHEMES}|{_OTHER_STORES}", re.IGNORECASE)
_KEYS = re.compile(_SCHEME % f"{_BUCKET_SCHEMES}|{_OTHER_STORES.partition('|sftp')[0]}", re.IGNORECASE)
"""Schemes whose paths may have : and @."""
_WEB = re.compile(_SCHEME % "https?|wss?", re.IGNORECASE)
_PORT = re.compile(r"(?P<name>[\w.-]+|\[[0-9A-Fa-f:.]*(?:%25[\w.-]+)?\]):(?P<port>\d{1,5})")
_USUAL_PORT = re.compile(r"21|22|80|443|[1-9]\d{3,4}")  # other short numbers may begin a password
_NUMERIC = re.compile(r"\d+\.\d+\.\d+\.\d+|localhost|\[[0-9A-Fa-f:.]*(?:%25[\w.-]+)?\]")
_HOST = re.compile(rf"(?:(?:[\w-]+\.)+[A-Za-z]{{2,}}|{_NUMERIC.pattern})(?::\d+)?")
"""What looks like a host. Names without a dot do not tell."""
_USER_WITH_SLASH = re.compile(
    r"(?!localhost/)[^/?#@:.\[\]\"'`,;<>{}]+/[^?#@:\"'`,;<>{}\[\]]*:(?:[^@\"'`<>]*@)+(?=[\w\[])"
)
_WITH_BLANKS = re.compile(
    r"(?P<begin>(?:^|[\"'`=])[A-Za-z][\w+.:-]{0,40}://)[^\s/?#@:\"'`]{1,200}:(?!\d+\s)[^\s/?#\"'`]{1,200}\s[^\n\"'`]{0,200}?@"
    r"(?=[\w.:\[\]-]{1,255}(?:[/?#\"'`]|$))"
)
"""User and password of an address that is all of a text, or stands in quotes: there, blanks are of the password."""
_PACKED = re.compile(r"(?P<begin>%(?:25)*3A(?:%(?:25)*2F){2})(?P<rest>[^\s\"'&<>]+)", re.IGNORECASE)
"""An address in another one, or in a form, with %3A%2F%2F for ://."""
_NAMES = (  # of files and their parts
    "alt bucket chunk container date dataset day dl doc download end ext f fid file fileid filename fn format i id idx "
    "index item lang mark month n name num o obj object objectid offset p page part partnumber path prefix raw ref "
    "response-content-type rev revision row seq shard size split start subset type v ver version versionid year"
)
_OPEN = frozenset(_NAMES.split())
"""Parameters of an address that are no secrets. Whatever else a server calls its key, token or signature stays hidden."""
_SIGNED = re.compile(
    r"(?:^|[-_.])(?:sig|sign|signature|hmac|jwt|token|secret|pass|pwd|cred|credentials?|auth|authorization|(?:api|access)[-_]?key|policy|"
    r"expir(?:es?|y|ation)|key-pair-id|jsessionid)(?:$|[-_.])|^x-(?:amz|goog|oss|ms)-|token$|signature$|passw|apikey|access(?:key)?id$",
    re.IGNORECASE,
)
"""Parameters that are made anew for the same file, and passwords. Those of `_SIGNED_BY_AZURE` are so beside `sig`."""
_AZURE = "se st sp sv sr spr sip si ss srt sdd skoid sktid skt ske sks skv saoid suoid scid rscd rsct"
_SIGNED_BY_AZURE = frozenset(_AZURE.split())


def without_users(text: str) -> str:
    """The text with HIDDEN in place of the users, passwords and parameters of its addresses, but for parameters that are no secrets."""
    if "://" in text:
        text = _ADDRESS.sub(_public, _WITH_BLANKS.sub(rf"\g<begin>{HIDDEN}@", text))
    return text


def without_packed(text: str, without_secrets: Callable[[str], str]) -> str:
    """The text without addresses that are encoded with %3A%2F%2F for ://, if `without_secrets` hides anything of them."""

    def packed(found: re.Match[str]) -> str:
        address = found["rest"]
        for _ in range(3):
            address = unquote(address)
        plain = f"https://{address}"
        return found[0] if without_secrets(plain) == plain else f"{found['begin']}{HIDDEN}"

    return _PACKED.sub(packed, text) if "%" in text else text


def identity_of(address: str) -> str:
    """What of an address tells its file from others: all but user, password, signature, and with http the fragment, which is not sent.

    It may have secrets of unknown names: it is to be compared, and not shown.
    """
    return _ADDRESS.sub(lambda found: _public(found, _identity), _WITH_BLANKS.sub(rf"\g<begin>{HIDDEN}@", address))


def _public(found: re.Match[str], parameters: "Callable[[str, str, str], str] | None" = None) -> str:
    rest, begin = found[0], found.start()
    further = _NEXT.finditer(rest, 4) if rest.find("://", 4) > 0 else ()
    places = [0, *(each.end() - 3 for each in further), len(rest)]
    scheme, texts = found.string[max(begin - _LONGEST_SCHEME, 0) : begin], []
    for at, end in pairwise(places):
        own = scheme
        texts.append("://" + _without_user(scheme, rest[at + 3 : end]))
        scheme = rest[max(end - _LONGEST_SCHEME, 0) : end]
    text = "".join(texts)
    address = text if parameters else text.rstrip(_END)  # these are of the sentence, and not of the address
    pattern = _QUERY_OF_STORE if _STORES.search(own) else _QUERY
    parts = pattern.fullmatch(address)
    assert parts is not None
    query = parts["query"] or ""
    mark = address[len(parts["path"])] if query else ""
    fragment = parts["fragment"] or ""
    if parameters:
        return parameters(parts["path"], mark + query, "" if _WEB.search(own) else fragment)
    public = _OF_PATH.sub(lambda its: ";" + _parameter(its[0][1:]), parts["path"])
    pieces = re.split("([&;])", query)
    public += mark + "".join(piece if at % 2 else _parameter(piece) for at, piece in enumerate(pieces))
    return public + (f"#{HIDDEN}" if fragment.strip("#") else fragment) + text[len(address) :]


def _identity(path: str, query: str, fragment: str) -> str:
    pieces = re.split("[?&;]", query)
    names = [piece.partition("=")[0].lower() for piece in pieces]
    azure = _SIGNED_BY_AZURE if "sig" in names else ()
    kept = [piece for name, piece in zip(names, pieces, strict=True) if name not in azure and not _SIGNED.search(name)]
    return "\0".join((path, *kept, fragment)).rstrip("\0")


def _without_user(scheme: str, address: str) -> str:
    """The address without what stands before the host. `scheme`: text that ends with it."""
    if not _KEYS.search(scheme) and (user := _USER_WITH_SLASH.match(address)):
        return f"{HIDDEN}{address[user.end() - 1 :]}"
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


def _parameter(text: str) -> str:
    name, equals, value = text.partition("=")
    if not text or (equals and name.lower() in _OPEN and not re.search("://|[@%]", unquote(value))):
        return text
    return f"{name}={HIDDEN}" if equals else HIDDEN
