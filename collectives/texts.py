"""Texts that people see: control characters as text, and without secrets: passwords and signatures of addresses, tokens, keys.

Pure, of the standard library alone: the supervisor loads this file by its path, on hosts without the packages that the rest of
collectives needs.
"""

import re
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from urllib.parse import unquote

HIDDEN = "***"
"""Stands for a secret."""
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
_B, _Q = r"[ \t]{0,4}", r"\\?[\"']"  # blanks, and a quote, which may be in a string itself
_VALUE = (
    rf"(?!(?:[bru]?{_Q})?(?:\*\*\*|(?:None|null|[Tt]rue|[Ff]alse)\b))(?:[bru]?(?P<quote>{_Q}))?"
    r"""(?P<secret>(?(quote)[^"'\\\n]+|[^\s"'&;,()\[\]{}\\]+))"""
)
_SECRET_NAMES = (
    r"(?:passwd|password|passphrase|secret|credentials?|(?:api|secret|access|private|account|master|encryption|shared[_-]?access)[_-]?key"
    r"(?:[_-]?id)?|(?:api|auth|access|refresh|session|bearer|hf|hub|github)[_-]token|sharedaccesssignature|x-(?:amz|goog)-(?:signature|credential))"
)
_LOUD_NAMES = r"(?<!BOS)(?<!EOS)(?<!PAD)(?<!UNK)(?<!SEP)(?<!CLS)(?<!MASK)_(?:TOKEN|KEY|PASS|PWD|PAT|JWT|WEBHOOK)"  # of the environment
_FORMS = (
    "hf_[A-Za-z0-9]{20,}", "(?:AKIA|ASIA)[A-Z0-9]{16}", r"AIza[\w-]{35}", "gh[pousr]_[A-Za-z0-9]{30,}", r"github_pat_\w{40,}",
    r"glpat-[\w-]{20,}", r"xox[abeprs]-[\w-]{10,}", r"sk-(?:[a-z]+-)*[A-Za-z0-9_]{24,}", r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+",
    r"ya29\.[\w-]{20,}", r"npm_[A-Za-z0-9]{30,}", r"pypi-[\w-]{40,}", r"dop_v1_[0-9a-f]{40,}", r"wandb_v1_\w{20,}",
)  # fmt: skip
"""Of tokens and keys of Hugging Face, AWS, Google, GitHub, GitLab, Slack, OpenAI and others, JSON web tokens."""
_WORD = r"(?!\*\*\*)(?P<secret>[^\s\"'\\]+)"
_HEADER = rf"(?:{_Q})?{_B}[:=]{_B}(?:{_Q})?"
_HOOKS = (
    r"hooks\.slack\.com/(?:services|workflows|triggers)/|discord(?:app)?\.com/api/webhooks/|api\.telegram\.org/(?:file/)?bot|"
    r"\.webhook\.office\.com/"
)
_WORDS_AND_PATTERNS = {
    "": rf"(?<![A-Za-z0-9])(?P<secret>{'|'.join(_FORMS)})",
    "passw passphrase secret credential key token sharedaccess x-amz x-goog": (
        rf"(?i:{_SECRET_NAMES}(?:{_B}={_B}|{_Q}{_B}[:=]{_B}|:{_B}(?=[\"']|[A-Za-z_+/=-]{{0,200}}\d[\w+/=-]{{5}}))){_VALUE}"
    ),
    "_token _key _pa _pwd _jwt _webhook": rf"{_LOUD_NAMES}(?:=|{_Q}{_B}[:=]{_B}|:[ ]){_VALUE}",
    "--": rf"(?i:--(?:[\w.-]{{0,40}}{_SECRET_NAMES}|token)[= ]){_VALUE}",
    "? &": rf"(?i:[?&][\w.-]{{0,40}}(?:signature|sig|token|credential|secret|password|key)=){_VALUE}",
    "authorization": (
        rf"(?i:authorization{_HEADER})(?:(?i:bearer|basic|token|digest|negotiate|aws4-hmac-sha256)[ \t]{{1,4}}|"
        rf"(?=[^\s\"'\\]{{0,200}}\d)){_WORD}"
    ),
    "bearer": r"(?i:\bbearer[ \t]{1,4})(?=[\w.~+/=-]{0,200}\d)(?P<secret>[\w.~+/=-]{8,})",
    "x- cookie": rf"(?i:\b(?:x-[\w-]{{0,40}}(?:key|token)|(?:set-)?cookie)(?:{_Q})?{_B}:{_B}(?:{_Q})?){_WORD}",
    "-----begin": r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?P<secret>(?!\*\*\*)[^-]+)",
    "hooks. webhook telegram.": rf"(?i:{_HOOKS})(?!\*\*\*)(?P<secret>[^\s\"'`<>?#]+)",
}
_SECRETS = [(words.split() or [""], re.compile(pattern)) for words, pattern in _WORDS_AND_PATTERNS.items()]
"""Secrets that are known by their form, or by what stands before them; before each pattern words in small letters, one of which a text
must have: to look for them is faster."""
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


def without_secrets(text: str) -> str:
    """The text with *** in place of secrets.

    In addresses (SCHEME://...) these are user and password, and all parameters but a few that are known to be no secrets, such as
    versionId; with http also the fragment. Elsewhere: tokens and keys of a known form, the values of names such as
    AWS_SECRET_ACCESS_KEY and password, and headers with an authorization.

    A password may have any characters, blanks if the address is all of the text or stands in quotes. An @ in the path of an address
    stays if a host stands before it for certain.
    """
    if "://" in text:
        text = _ADDRESS.sub(_public, _WITH_BLANKS.sub(rf"\g<begin>{HIDDEN}@", text))
    if "%" in text:
        text = _PACKED.sub(_packed, text)
    lower = text.lower()
    for words, pattern in _SECRETS:
        if any(word in lower for word in words):
            text = pattern.sub(_hidden, text)
    return text


def identity_of(address: str) -> str:
    """What of an address tells its file from others: all but user, password, signature, and with http the fragment, which is not sent.

    It may have secrets of unknown names: it is to be compared, and not shown.
    """
    return _ADDRESS.sub(lambda found: _public(found, _identity), _WITH_BLANKS.sub(rf"\g<begin>{HIDDEN}@", address))


def _hidden(found: re.Match[str]) -> str:
    """The match with *** in place of its group "secret"."""
    begin, end = (at - found.start() for at in found.span("secret"))
    return f"{found[0][:begin]}{HIDDEN}{found[0][end:]}"


def _packed(found: re.Match[str]) -> str:
    """An encoded address, of which nothing after :// stays if anything of it is secret."""
    address = found["rest"]
    for _ in range(3):
        address = unquote(address)
    plain = f"https://{address}"
    return found[0] if without_secrets(plain) == plain else f"{found['begin']}{HIDDEN}"


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
