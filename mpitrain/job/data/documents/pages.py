"""What a Parquet file says of its row groups, and how much text their pages can stand for before any of it is decoded.

The footer says how large a column is, and any number may stand there. The headers of the pages say it, too, and a decoder holds to
them: a page that does not unpack to the size in its header is an error. A page is at most 2 GiB, but a dictionary of one long text
stands for any number of rows, and so do rows that begin as the one before.

Source of the formats: https://github.com/apache/parquet-format, parquet.thrift.
"""

import re
from functools import cache
from typing import Any, NamedTuple

from mpitrain.job.data.documents.thrift import (
    BINARY,
    FALSE,
    I32,
    I64,
    LIST,
    STRUCT,
    TRUE,
    ThriftError,
    Wanted,
    read_number,
    read_struct,
)

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3  # types of pages
_PLAIN, _DELTA_LENGTH = 0, 6  # encodings in which each row has bytes of its own
_OF_DICTIONARY = (2, 8)
_DENSE = 100  # text is rarely packed to less than a 50th
_MORE_BYTES = 100  # that the footers of an old writer leave out of a column, as pyarrow knows
_PAGE = Wanted({1: I32, 2: I32, 3: I32, 5: Wanted({1: I32, 2: I32}), 8: Wanted({1: I32, 4: I32})})
_ROW_GROUPS, _COLUMNS, _NUM_ROWS = 4, 1, 3
_FILE_PATH, _ABOUT, _PACKED_BYTES, _FIRST_PAGE, _DICTIONARY_PAGE = 1, 3, 7, 9, 11
_CRYPTO, _ENCRYPTED_ABOUT = 8, 9


@cache
def _usual_form() -> re.Pattern[bytes]:
    """A column of a row group as most writers write it: its fields in order, without names of files; no long texts."""

    def first(byte: int) -> bytes:
        return re.escape(bytes([byte]))

    def field(kind: int, value: bytes = b"") -> bytes:
        """With a number that is larger than that of the field before."""
        return b"[" + b"".join(first(step << 4 | kind) for step in range(1, 16)) + b"]" + value

    def items(kind: int, value: bytes, most: int) -> bytes:
        return b"(?:" + b"|".join(first(num << 4 | kind) + value * num for num in range(most + 1)) + b")"

    number = rb"[\x80-\xff]{0,8}+[\x00-\x7f]"
    text = b"(?:" + b"|".join(first(length) + b".{%d}" % length for length in range(128)) + b")"
    numbers, structs = items(I32, number, 8), items(STRUCT, b"(?:" + field(I32, number) + rb"){0,4}+\x00", 8)
    flat = [field(I32, number), field(I64, number), field(BINARY, text), field(TRUE), field(FALSE)]
    flat += [field(LIST, value) for value in (numbers, items(I64, number, 8), structs)]
    struct = b"(?:" + b"|".join(flat) + rb"){0,20}+\x00"
    others = b"(?:" + b"|".join([*flat, field(STRUCT, struct)]) + rb"){0,20}+\x00"
    about = rb"\x15%b\x19%b\x19%b\x15%b\x16%b\x16%b" % (number, numbers, items(BINARY, text, 2), number, number, number)
    places = rb"\x16(%b)\x26(%b)(?:\x26(%b)|(?![\x10-\x2f]))" % (number, number, number)
    return re.compile(rb"\x26%b\x1c" % number + about + places + others + others, re.DOTALL)


def _usual_column(data: Any, at: int) -> tuple[dict[int, Any], int] | None:
    """See Wanted."""
    if (found := _usual_form().match(data, at)) is None:
        return None
    packed, page, dictionary = found.start(1), found.start(2), found.start(3)
    about = {_PACKED_BYTES: read_number(data, packed)[0], _FIRST_PAGE: read_number(data, page)[0]}
    if dictionary >= 0:
        about[_DICTIONARY_PAGE] = read_number(data, dictionary)[0]
    return {_ABOUT: about}, found.end()


_COLUMN = Wanted(
    {
        _FILE_PATH: BINARY,
        _ABOUT: Wanted({_PACKED_BYTES: I64, _FIRST_PAGE: I64, _DICTIONARY_PAGE: I64}),
        _CRYPTO: Wanted({}),
        _ENCRYPTED_ABOUT: BINARY,
    },
    _usual_column,
)
_FOOTER = Wanted({_ROW_GROUPS: Wanted({_COLUMNS: _COLUMN, _NUM_ROWS: I64})})


class PageError(ValueError):
    """The file is damaged. The text says where."""


class RowGroup(NamedTuple):
    """A row group. `begin`: its first byte. `pages`: the first byte of a column's pages, and the one after the last."""

    num_rows: int
    begin: int
    pages: tuple[int, int]


class TextExtent(NamedTuple):
    """How much text a column of a row group can stand for."""

    num_bytes: int
    """Of all rows."""
    shared_bytes: int
    """Of a row whose bytes are also those of others: of a dictionary, or of the row before."""
    page_bytes: int
    """Of a page of rows with bytes of their own."""
    page_rows: int
    """The fewest rows of such a page, except for the last one."""

    def rows_within(self, num_bytes: int) -> int:
        """How many neighbouring rows have at most `num_bytes` bytes, wherever they are, or at most three pages of rows; at least 1."""
        half, page_bytes = num_bytes // 2, max(self.page_bytes, 1)
        of_shared = half // max(self.shared_bytes, 1)
        pages = half // page_bytes  # n rows touch at most n pages, and at most n / page_rows + 2
        if pages > 2:
            of_pages = max(pages, (pages - 2) * self.page_rows)
        else:  # of one large page, a part that is as large as a part of the rows mostly is
            of_pages = self.page_rows * half // (2 * page_bytes)
        return max(min(of_shared, of_pages), 1)


def row_groups_of(data: Any, size: int, column: int, num_columns: int) -> list[RowGroup]:
    """The row groups of a file, `data` of `size` bytes. `column`: one of `num_columns`. PageError if they do not lie in this file."""
    length = int.from_bytes(data[size - 8 : size - 4], "little")
    try:
        footer, _ = read_struct(bytes(data[max(size - 8 - length, 0) : size - 8]), 0, length, _FOOTER)
    except ThriftError as error:
        raise PageError(f"its footer is damaged: {error}") from None
    return [_row_group(its, n, size, column, num_columns) for n, its in enumerate(footer.get(_ROW_GROUPS, []))]


def _row_group(its: dict[int, Any], number: int, size: int, column: int, num_columns: int) -> RowGroup:
    columns, num_rows = its.get(_COLUMNS, []), _int(its, _NUM_ROWS)
    if num_rows < 0 or len(columns) != num_columns:
        raise PageError(
            f"row group {number} has {len(columns)} columns of {num_rows} rows, and the file {num_columns} columns"
        )
    if other := next((each[_FILE_PATH] for each in columns if each.get(_FILE_PATH)), None):
        raise PageError(
            f"row group {number} is in another file, {other.decode(errors='replace')!r}; expected that file"
        )
    if not {_CRYPTO, _ENCRYPTED_ABOUT}.isdisjoint(columns[column]):
        raise PageError(f"the column is encrypted in row group {number}, and encrypted columns are not read")
    begin = min(_begin_of(each) for each in columns)
    about = columns[column].get(_ABOUT, {})
    first, length = min(_begin_of(columns[column]), _int(about, _FIRST_PAGE)), _int(about, _PACKED_BYTES)
    if num_rows and not (0 <= begin < size and 0 <= first < size and 0 <= length <= size - first):
        raise PageError(
            f"row group {number} begins at byte {begin}, its column has {length} bytes at byte {first}, and the file has {size} bytes"
        )
    return RowGroup(num_rows, begin, (first, first + length))


def _begin_of(column: dict[int, Any]) -> int:
    """The first byte of a column: of its dictionary, if it has one."""
    about = column.get(_ABOUT, {})
    dictionary = _int(about, _DICTIONARY_PAGE)
    return dictionary if dictionary > 0 else _int(about, _FIRST_PAGE)


def extent_of(data: Any, begin: int, end: int, num_rows: int, most_page_bytes: int) -> TextExtent:
    """The extent of the pages from byte `begin` to `end - 1` of a file, of `num_rows` rows.

    `data`: the bytes of the file. A row is a text, and not a list of texts. PageError if a page is damaged, or larger than
    `most_page_bytes`; a page of few bytes in the file, than a quarter of it; or if there are other than `num_rows` rows.
    """
    most_end = min(end + _MORE_BYTES, len(data))
    num_bytes = shared_bytes = own_bytes = entry_bytes = seen = 0
    page_rows, at = num_rows, begin
    while seen < num_rows or at < end:
        try:
            header, body = read_struct(data, at, most_end, _PAGE)
        except ThriftError as error:
            raise PageError(f"the page at byte {at} is damaged: {error}") from None
        kind, unpacked, packed = (_int(header, field) for field in (1, 2, 3))
        if min(unpacked, packed) < 0 or body + packed > most_end:
            sizes = f"{packed} bytes, of which {most_end - body} are there"
            unknown = "it does not say how many bytes it has (or it is encrypted)"
            raise PageError(f"the page at byte {at} is damaged: {unknown if min(unpacked, packed) < 0 else sizes}")
        page_bytes = max(unpacked, packed)
        if page_bytes > most_page_bytes // (4 if page_bytes > _DENSE * packed else 1):
            raise PageError(
                f"the page at byte {at} unpacks from {packed} to {unpacked} bytes; expected at most {most_page_bytes}, or a quarter of "
                f"it from less than a {_DENSE}th: write the file with smaller pages (data_page_size and write_batch_size of pyarrow)"
            )
        if kind == _DICTIONARY:
            entry_bytes = page_bytes
        elif kind in (_DATA, _DATA_V2):
            about = header.get(5 if kind == _DATA else 8)
            if not isinstance(about, dict) or (num := _int(about, 1)) < 0:
                raise PageError(f"the page at byte {at} is damaged: it does not say how many rows it has")
            encoding = _int(about, 2 if kind == _DATA else 4)
            seen += num
            if encoding in (_PLAIN, _DELTA_LENGTH):
                num_bytes += page_bytes
                own_bytes = max(own_bytes, page_bytes)
                page_rows = min(page_rows, num) if seen < num_rows else page_rows
            else:
                of_row = entry_bytes if encoding in _OF_DICTIONARY else page_bytes
                shared_bytes = max(shared_bytes, of_row)
                num_bytes += num * of_row
        at = body + packed
    if seen > num_rows:
        raise PageError(f"its pages have {seen} rows, and the footer of the file says {num_rows}")
    return TextExtent(num_bytes, shared_bytes, own_bytes, page_rows)


def _int(fields: dict[int, Any], number: int) -> int:
    value = fields.get(number, -1)
    return value if type(value) is int else -1
