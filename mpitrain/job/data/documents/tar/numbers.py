"""Fields of a tar header, and whether its checksum is right."""

BLOCK = 512
"""Headers and members begin at multiples of this number of bytes."""


def number(field: bytes) -> int:
    """A number in octal digits, or in base 256 if the first bit is set. A negative number if it is neither."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big") if field[0] != 0xFF else -1
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return -1


def is_header(block: bytes) -> bool:
    """Whether these bytes are a header: their sum, with spaces in the checksum's place, is the checksum.

    Some old programs have added the bytes as signed numbers: theirs differs for names with bytes above 0x7f.
    """
    if len(block) != BLOCK:
        return False
    found, rest = number(block[148:156]), block[:148] + block[156:]
    total = sum(rest) + 8 * 32
    return found >= 0 and found in (total, total - 256 * sum(byte > 0x7F for byte in rest))


def short_name(header: bytes) -> bytes:
    """The name in a header, with the prefix of ustar."""
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0" and header[345]:
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return name


def rounded_up(num_bytes: int) -> int:
    """The bytes of whole blocks that so many bytes take."""
    return (num_bytes + BLOCK - 1) // BLOCK * BLOCK
