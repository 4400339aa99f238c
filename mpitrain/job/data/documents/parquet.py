"""Parquet files, with pyarrow (`pip install "mpitrain[parquet]"`): each row is a document. The text is a column of strings or bytes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.job.data.documents.heads import HEAD_BYTES, other_than
from mpitrain.job.data.documents.pages import PageError, extent_of, row_groups_of
from mpitrain.job.data.documents.reading import DamagedSampleError, DamagedShardError, MappedFile, in_one_line
from mpitrain.job.data.documents.texts import Texts


class CutLimits(NamedTuple):
    """What a cut may take, in bytes of text. A file of a few bytes can stand for any number of them."""

    page_bytes: int = 5 << 28
    """Of a page, which is decoded as a whole, in three times its memory. pyarrow writes at least 1024 rows into a page: 1 GiB of texts
    of 1 MiB."""
    piece_bytes: int = 64 << 20
    """Decoded at a time, if the pages are smaller."""
    held_bytes: int = 256 << 20
    """In memory. What is more goes into a temporary file."""
    most_bytes: int = 8 << 30
    """In all."""
    piece_rows: int = 1 << 20
    """Decoded at a time: rows without text have no bytes."""
    most_rows: int = 1 << 24
    """In all: 6 to 9 bytes of memory each, and 24 while they are permuted."""


class ParquetReader:
    """An open Parquet file. `name`: see MappedFile. `field`: the column of the text.

    ImportError without pyarrow. DamagedShardError if the file is no Parquet file, or has no such column, or has two.
    """

    remark = ""
    """See Reader."""

    def __init__(self, path: Path, name: str, field: str = "text", limits: CutLimits = CutLimits()) -> None:  # noqa: B008
        try:
            import pyarrow as arrow
            from pyarrow import parquet
        except ImportError:
            raise ImportError(f'{name}: Parquet files need pyarrow: pip install "mpitrain[parquet]"') from None
        self.name, self._arrow, self._limits = name, arrow, limits
        self._errors = (arrow.ArrowException, OSError, ValueError, KeyError, IndexError, OverflowError)
        self._mapped = MappedFile(path, name)
        try:
            self._file = parquet.ParquetFile(
                arrow.BufferReader(arrow.py_buffer(self._mapped.bytes)), page_checksum_verification=True
            )
            self._column = self._column_of(field)
            # pyarrow's own view of the footer may end the process.
            num_columns = len(self._file.schema)
            self._groups = row_groups_of(self._mapped.bytes, self._mapped.size, self._column, num_columns)
            self._begins = np.array([group.begin for group in self._groups], np.int64)
            self._firsts = [0, *accumulate(group.num_rows for group in self._groups)]
        except DamagedShardError:
            raise
        except PageError as error:
            raise self._damaged(f": {error}") from None
        except self._errors as error:
            other = other_than("a Parquet file", self._mapped.bytes[:HEAD_BYTES])
            raise self._damaged(f": {other or f'expected a Parquet file: {error}'}") from None

    def cut(self, begin: int, end: int) -> "ParquetCut":
        """See Reader. Rows are read in whole row groups: all of a group count as its first byte."""
        groups = np.flatnonzero((self._begins >= begin) & (self._begins < end)).tolist()
        texts = Texts(self._limits.held_bytes)
        for portion in self._portions(groups):
            with self._errors_of(portion.groups):
                self._read(portion, texts)
        return ParquetCut(self.name, self._rows(groups), texts)

    def close(self) -> None:
        """See Reader."""
        self._file.close()
        self._mapped.close()

    def _damaged(self, text: str) -> DamagedShardError:
        """An error of which the text may have the words of pyarrow, or names that stand in the file."""
        return DamagedShardError(f"{self.name}{in_one_line(text)}")

    def _rows(self, groups: Sequence[int]) -> Sequence[int]:
        """The numbers of the rows of some row groups, mostly neighbours."""
        rows = [range(self._firsts[group], self._firsts[group + 1]) for group in groups]
        if all(before.stop == after.start for before, after in pairwise(rows)):
            return range(rows[0].start, rows[-1].stop) if rows else range(0)
        return list(chain(*rows))

    @contextmanager
    def _errors_of(self, groups: Sequence[int]) -> Iterator[None]:
        """What goes wrong with some row groups names them."""
        try:
            yield
        except DamagedShardError:
            raise
        except OSError as error:
            if error.errno is not None:  # of the temporary file
                raise OSError(error.errno, f"{self.name}, {_named(groups)}: {error.strerror}") from None
            raise self._damaged(f", {_named(groups)}: {error}") from None
        except self._errors as error:
            raise self._damaged(f", {_named(groups)}: {error}") from None

    def _portions(self, groups: Sequence[int]) -> Iterator["_Portion"]:
        """Row groups that are decoded by one call: as many as have together at most `piece_bytes` bytes of text, or a large one."""
        most = self._limits.piece_bytes
        held: list[int] = []
        held_bytes = held_rows = 0
        for group in groups:
            num_rows, _, pages = self._groups[group]
            if not num_rows:
                continue
            with self._errors_of([group]):
                extent = extent_of(self._mapped.bytes, *pages, num_rows, self._limits.page_bytes)
            if held and held_bytes + extent.num_bytes > most:
                yield _Portion(held, held_rows, held_rows)
                held, held_bytes, held_rows = [], 0, 0
            if extent.num_bytes > most:
                yield _Portion([group], num_rows, extent.rows_within(most))
            else:
                held.append(group)
                held_bytes, held_rows = held_bytes + extent.num_bytes, held_rows + num_rows
        if held:
            yield _Portion(held, held_rows, held_rows)

    def _read(self, portion: "_Portion", texts: Texts) -> None:
        """Add the texts of some row groups."""
        (groups, num_rows, rows_at_a_time), limits = portion, self._limits
        before = texts.num
        rows_at_a_time = min(rows_at_a_time, limits.piece_rows)
        for batch in self._file.reader.iter_batches(rows_at_a_time, groups, [self._column], use_threads=False):
            _add(texts, batch.column(0))
            del batch  # before the next one is decoded
            if texts.num_bytes > limits.most_bytes or texts.num > limits.most_rows:
                raise DamagedShardError(
                    f"{self.name}, {_named(groups)}: {texts.num} rows are read at once, {before} of other row groups, and have "
                    f"{texts.num_bytes} bytes of text; expected at most {limits.most_rows} rows of {limits.most_bytes} bytes in the "
                    "row groups that begin in one part of a file: write the rows into more, smaller files"
                )
        if (num := texts.num - before) != num_rows:
            raise DamagedShardError(
                f"{self.name}, {_named(groups)}: {num} rows are there, and the footer of the file says {num_rows}"
            )

    def _column_of(self, field: str) -> int:
        """The number of a column, among those that hold values. DamagedShardError if there is none, or two, or not of text."""
        schema = self._file.schema_arrow
        if (num := schema.names.count(field)) != 1:
            have = f"expected a column {field!r}, got {', '.join(schema.names)}; data.field names it"
            raise self._damaged(f": {f'{num} columns are called {field!r}' if num else have}")
        kind, types = schema.field(field).type, self._arrow.types
        kind = kind.value_type if types.is_dictionary(kind) else kind
        of_strings = (types.is_string, types.is_large_string, types.is_string_view)
        of_bytes = (types.is_binary, types.is_large_binary, types.is_binary_view)
        if not any(is_kind(kind) for is_kind in (*of_strings, *of_bytes)):
            raise self._damaged(f": expected strings in the column {field!r}, got {schema.field(field).type}")
        paths = [self._file.schema.column(number).path for number in range(len(self._file.schema))]
        if paths.count(field) != 1:  # of a structure `a` with a part `b` and of a column `a.b`
            raise self._damaged(f": {paths.count(field)} columns are called {field!r}")
        return paths.index(field)


class _Portion(NamedTuple):
    groups: list[int]
    num_rows: int
    rows_at_a_time: int


class ParquetCut:
    """The rows of some row groups: their numbers in the file, and their texts. See Cut."""

    def __init__(self, name: str, rows: Sequence[int], texts: Texts) -> None:
        self._name, self._rows, self._texts = name, rows, texts

    def __len__(self) -> int:
        return len(self._rows)

    def key(self, index: int) -> bytes:
        return f"{self._name}:{self._rows[index]}".encode(errors="surrogateescape")

    def where(self, index: int) -> str:
        return f"{self._name}, row {self._rows[index]}"

    def text(self, index: int) -> bytes:
        if (value := self._texts[index]) is None:
            raise DamagedSampleError(f"{self.where(index)}: expected text, got null")
        return value

    def is_as_before(self) -> bool:
        return True


def _named(groups: Sequence[int]) -> str:
    return f"row group {groups[0]}" if len(groups) == 1 else f"row groups {groups[0]} to {groups[-1]}"


def _add(texts: Texts, array: Any) -> None:
    """Add an array of strings or bytes. They need not be UTF-8: that is one damaged document, not an error of the whole."""
    import pyarrow as arrow

    kind = array.type
    if arrow.types.is_dictionary(kind):
        array = array.dictionary_decode()
    if arrow.types.is_string_view(array.type) or arrow.types.is_binary_view(array.type):
        array = array.cast(arrow.large_binary())
    is_large = arrow.types.is_large_string(array.type) or arrow.types.is_large_binary(array.type)
    _, begins, data = array.buffers()
    if not len(array):
        return
    width = np.int64 if is_large else np.int32
    found = np.frombuffer(begins, width, len(array) + 1, array.offset * np.dtype(width).itemsize)
    missing = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    texts.add(found, memoryview(data) if data is not None else memoryview(b""), missing)
