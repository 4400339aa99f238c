"""What the first bytes of a file say, of which the name says that it is text."""

import re

import msgspec

HEAD_BYTES = 4096

_MAGIC = {
    b"\x1f\x8b\x08": "compressed by gzip, without the ending .gz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd, without the ending .zst",
    b"\xfd7zXZ\0": "compressed by xz, which is not read; expected .gz or .zst",
    b"BZh": "compressed by bzip2, which is not read; expected .gz or .zst",
    b"\x04\x22\x4d\x18": "compressed by lz4, which is not read; expected .gz or .zst",
    b"PK\3\4": "a zip archive, which is not read; expected .tar",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive, which is not read; expected .tar",
    b"PAR1": "a Parquet file, without the ending .parquet",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file, without the ending .h5",
    b"\x93NUMPY": "a NumPy file, without the ending .npy",
    b"ARROW1\0\0": "an Arrow file, which is not read; expected .parquet",
    b"\xff\xff\xff\xff": "a stream of Arrow, which is not read; expected .parquet",
}
_BZIP2 = re.compile(rb"BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90)")
_STRING_OR_BRACKET = re.compile(rb'("(?:[^"\\]|\\.)*")(\s*:)?|[\[\]{}]')
_JSON = re.compile(rb'(?:\xef\xbb\xbf)?\s*(?:\{\s*["}]|\[\s*[{"])')


def other_format(head: bytes) -> str:
    """The format of a file that is no text, by its first `HEAD_BYTES` bytes: "compressed by gzip, ...". "" if none is known."""
    if head.startswith(b"BZh") and not _BZIP2.match(head):
        return ""  # a text can begin so
    if head[257:262] == b"ustar":
        return "a tar file, without the ending .tar"
    return next((what for magic, what in _MAGIC.items() if head.startswith(magic)), "")


def other_than(own: str, head: bytes) -> str:
    """A message about a file that begins as one of another format than `own`, such as "a tar file". "" if it does not."""
    other = other_format(head)
    return "" if not other or other.startswith(own) else f"expected {own}, got a file that is {other}"


def begins_with_json(head: bytes) -> bool:
    """Whether a text begins with a JSON object, or with a list of objects or strings. It may be in UTF-16, as Windows writes it."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        head = head.decode("utf-16", errors="ignore").encode(errors="ignore")
    return _JSON.match(head) is not None


def is_json_lines(head: bytes) -> bool:
    """Whether a text that begins with JSON has an object in each line, as far as its head shows: the first line is whole."""
    first, end, _ = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")
    if not first.startswith(b"{"):
        return False
    if not end and len(head) >= HEAD_BYTES:
        return True  # a long line: objects over several lines have short ones
    try:
        msgspec.json.decode(first)
    except (msgspec.MsgspecError, RecursionError):
        return b"NaN" in first or b"Infinity" in first
    return True


def are_documents(head: bytes, field: str) -> bool:
    """Whether JSON Lines are documents, and not one object of a program in one line: by a second object, or the field of the text."""
    first, _, rest = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")
    if rest.lstrip().startswith(b"{"):
        return True
    key, depth = b'"' + field.encode() + b'"', 0
    for found in _STRING_OR_BRACKET.finditer(first):
        if found[1]:
            if depth == 1 and found[2] and found[1] == key:
                return True
        else:
            depth += 1 if found[0] in b"[{" else -1
    return False
