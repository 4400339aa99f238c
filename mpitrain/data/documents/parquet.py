"""Parquet files, with pyarrow (`pip install "mpitrain[parquet]"`): each row is a document. The text is a column of strings or bytes."""

from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.documents.reading import DamagedSampleError, DamagedShardError


class ParquetReader:
    """An open Parquet file. `name`: see MappedFile. `field`: the column of the text.

    ImportError without pyarrow. DamagedShardError if the file is no Parquet file, or has no such column.
    """

    def __init__(self, path: Path, name: str, field: str = "text") -> None:
        try:
            import pyarrow as arrow
            from pyarrow import parquet
        except ImportError:
            raise ImportError(f'{name}: Parquet files need pyarrow: pip install "mpitrain[parquet]"') from None
        self.name, self._field, self._arrow = name, field, arrow
        try:
            self._file = parquet.ParquetFile(path, memory_map=True)
        except (arrow.ArrowException, OSError) as error:
            raise DamagedShardError(f"{name}: expected a Parquet file: {error}") from None
        schema = self._file.schema_arrow
        if field not in schema.names:
            self._file.close()
            raise DamagedShardError(
                f"{name}: expected a column {field!r}, got {', '.join(schema.names)}; data.field names it"
            )
        kind = schema.field(field).type
        if not any(is_kind(kind) for is_kind in _kinds(arrow)):
            self._file.close()
            raise DamagedShardError(f"{name}: expected strings in the column {field!r}, got {kind}")
        self._begins = np.array([self._begin_of(group) for group in range(self._file.num_row_groups)], np.int64)
        self._firsts = np.cumsum([0] + [self._file.metadata.row_group(i).num_rows for i in range(len(self._begins))])

    def cut(self, begin: int, end: int) -> "ParquetCut":
        """See Reader. Rows are read in whole row groups: all of a group count as its first byte."""
        first, last = np.searchsorted(self._begins, (begin, end))
        groups = list(range(int(first), int(last)))
        if not groups:
            return ParquetCut(self, 0, None)
        try:
            column = (
                self._file.read_row_groups(groups, columns=[self._field], use_threads=False).column(0).combine_chunks()
            )
            column = column.cast(
                self._arrow.large_binary()
            )  # text that is not UTF-8 is one damaged document, not an error of the whole
        except (self._arrow.ArrowException, OSError) as error:
            raise DamagedShardError(f"{self.name}, row groups {groups}: {error}") from None
        return ParquetCut(self, int(self._firsts[first]), column)

    def close(self) -> None:
        """See Reader."""
        self._file.close()

    def _begin_of(self, group: int) -> int:
        """The first byte of a row group: of any of its columns, and of their dictionaries."""
        columns = self._file.metadata.row_group(group)
        places = [columns.column(i) for i in range(columns.num_columns)]
        return min(each.dictionary_page_offset or each.data_page_offset for each in places)


class ParquetCut:
    """The rows of neighbouring row groups. See Cut."""

    def __init__(self, reader: ParquetReader, first: int, column: Any) -> None:
        self._reader, self._first, self._column = reader, first, column

    def __len__(self) -> int:
        return 0 if self._column is None else len(self._column)

    def key(self, index: int) -> bytes:
        return f"{self._reader.name}:{self._first + index}".encode(errors="surrogateescape")

    def where(self, index: int) -> str:
        return f"{self._reader.name}, row {self._first + index}"

    def text(self, index: int) -> bytes:
        value: bytes | None = self._column[index].as_py()
        if value is None:
            raise DamagedSampleError(f"{self.where(index)}: expected text, got null")
        return value


def _kinds(arrow: Any) -> tuple[Any, ...]:
    types = arrow.types
    return types.is_string, types.is_large_string, types.is_binary, types.is_large_binary
