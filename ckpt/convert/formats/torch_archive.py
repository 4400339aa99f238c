"""The check of a `.pt` file before torch reads it: what it asks torch to do must be bounded by its own bytes.

`torch.load(weights_only=True)` runs no code of a file, but it makes arrays of any size that the file asks for, inflates compressed
records without a limit, and copies shared lists again and again. A file of `torch.save` does none of this. So the directory of the zip
file is read first, then the pickle in it is followed without making its objects.
"""

import pickletools
import re
import struct
from collections.abc import Iterator, Sequence
from typing import IO, Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

MIN_TORCH = (2, 10)
"""Older ones can be made to overwrite memory by a file that they read with weights_only=True: CVE-2026-24747."""

_MAX_DIRECTORY_BYTES = 16 << 20  # for 200,000 tensors
_MAX_PICKLE_BYTES = 32 << 20
_MAX_OPERATIONS = 2_000_000  # for 60,000 tensors; a second for each million
_MAX_NAME = 500
_LONG = 1000  # texts below count as one item
_MAX_COPIED = 1 << 24  # items of lists and dicts that calls copy, all together
_OF_HASHED = 1 << 10
"""Items for which one counts whose hash a file can choose: 16,000 of one hash take seconds, and 32,000 four times that."""

_TAIL = struct.Struct("<4s4H2LH")  # the end of a zip file
_LOCATOR, _TAIL_64 = struct.Struct("<4sLQL"), struct.Struct("<4sQ2H2L4Q")  # before it, if numbers do not fit it
_DATA = "/data.pkl"

_BY_TYPE = "torch._tensor._rebuild_from_type_v2"  # calls the first of what it gets
_CALLS = {
    *(f"torch._utils._rebuild_{what}" for what in ("tensor", "tensor_v2", "tensor_v3", "parameter", "sparse_tensor")),
    *("torch._utils._rebuild_parameter_with_state", "torch._utils._rebuild_meta_tensor_no_storage"),
    *(_BY_TYPE, "torch.serialization._get_layout", "torch.Size", "torch.device"),
    *("collections.OrderedDict", "collections.Counter", "__builtin__.set", "builtins.set", "builtins.complex"),
    *("__builtin__.complex", "_codecs.encode"),
}
"""What a pickle may call. None makes more than it is given. torch itself refuses what is neither here nor in torch."""
_HASHING = {"collections.OrderedDict", "collections.Counter", "__builtin__.set", "builtins.set"}
"""Those that hash what they are given."""


def version_error(version: str) -> str | None:
    """The reason why this version of torch must not read a file of a stranger, or None."""
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) >= MIN_TORCH:
        return None
    return (
        f"torch is {version}; expected {'.'.join(map(str, MIN_TORCH))} or later to read files of torch, because a file can make older "
        "ones overwrite memory (CVE-2026-24747): update torch, or convert the file to safetensors"
    )


def check(file: IO[bytes]) -> None:
    """ValueError with the reason if the open file is no zip file of `torch.save`, or if reading it could take more than its bytes."""
    size = file.seek(0, 2)
    offset, length = _directory(file, size)
    if length > _MAX_DIRECTORY_BYTES:
        raise ValueError(f"its directory has {length} bytes; expected at most {_MAX_DIRECTORY_BYTES}")
    try:
        with ZipFile(file) as archive:
            records = archive.infolist()
            if archive.start_dir != offset:
                raise ValueError("it has more than one directory, or bytes before the first record")
            for record in records:
                if (
                    record.compress_type != ZIP_STORED
                    or record.compress_size != record.file_size
                    or record.flag_bits & 1
                ):
                    raise ValueError("a record is compressed; torch.save compresses none")
                if record.header_offset + record.file_size > offset:
                    raise ValueError("a record ends behind the directory")
            if len({record.filename.lower() for record in records}) < len(records):
                raise ValueError("two records have one name")
            pickles = [record for record in records if record.filename.lower().endswith(_DATA)]
            if len(pickles) != 1:
                raise ValueError(f"it has {len(pickles)} records {_DATA[1:]}; expected one")
            if pickles[0].file_size > _MAX_PICKLE_BYTES:
                raise ValueError(f"its pickle has {pickles[0].file_size} bytes; expected at most {_MAX_PICKLE_BYTES}")
            del pickles[0].CRC  # a file has none if the user has told torch so, and torch does not look at it
            data = archive.read(pickles[0])
    except (
        BadZipFile,
        NotImplementedError,
        RuntimeError,
        struct.error,
        UnicodeDecodeError,
        EOFError,
        OSError,
    ) as error:
        raise ValueError(f"its directory is damaged: {error}") from None
    try:
        _follow(data)
    except (IndexError, KeyError, struct.error, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(f"its pickle is damaged: {type(error).__name__}") from None


def _directory(file: IO[bytes], size: int) -> tuple[int, int]:
    """The first byte and the length of the directory. torch and `zipfile` look for its end at the same place, if no comment follows."""
    problem = "it does not end as a zip file of torch.save does"
    if size < _TAIL.size:
        raise ValueError(problem)
    file.seek(size - _TAIL.size)
    mark, *_, length, offset, comment = _TAIL.unpack(file.read(_TAIL.size))
    if mark != b"PK\5\6" or comment:
        raise ValueError(problem)
    if size >= _TAIL.size + _LOCATOR.size:
        file.seek(size - _TAIL.size - _LOCATOR.size)
        mark, _, at, _ = _LOCATOR.unpack(file.read(_LOCATOR.size))
        if mark == b"PK\6\7":
            file.seek(min(at, size))
            tail = file.read(_TAIL_64.size)
            if len(tail) < _TAIL_64.size or not tail.startswith(b"PK\6\6"):
                raise ValueError(problem)
            *_, length, offset = _TAIL_64.unpack(tail)
    return offset, length


class _Value:
    """What following a pickle knows of a value: the name of a function or class, and the items that a copy of it has, or a hash reads.

    `hashed`: the items for which those in it count as keys. `first`: of a tuple, the name of its first item. `is_plain`: a text, or a
    number of few bits; these have different hashes. `is_done`: it is in another value, or cannot have items, so it gets none any more.
    """

    __slots__ = ("first", "hashed", "is_done", "is_plain", "items", "name")

    def __init__(self, name: str = "", items: int = 0, *, is_plain: bool = False, is_done: bool = False) -> None:
        self.name, self.items, self.hashed, self.first = name, items, items, ""
        self.is_plain, self.is_done = is_plain, is_done

    def add(self, values: Sequence["_Value"]) -> None:
        """Put values into it. ValueError for a list or dict that is in another value already, which counts the items that it had."""
        if self.is_done:
            raise ValueError(
                "its pickle fills a list or dict after its use, such as one that is in itself, which is not taken"
            )
        self.items = min(self.items + len(values) + sum(value.items for value in values), _MAX_COPIED + 1)
        self.hashed = min(self.hashed + sum(map(_hashed, values)), _MAX_COPIED + 1)
        for value in values:
            value.is_done = True


def _tuple_of(values: Sequence[_Value]) -> _Value:
    made = _Value()
    made.add(values)
    made.first = values[0].name if values else ""
    return made


def _hashed(value: _Value) -> int:
    """The items for which a value counts as a key."""
    return value.hashed + (1 if value.is_plain else _OF_HASHED)


_PLAIN = _Value(is_plain=True, is_done=True)
_BIG = _Value(is_done=True)
_LONGEST_PLAIN = 1 << 60
_PUSHES = {
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1"),
    *("BINUNICODE", "SHORT_BINSTRING"),
}  # fmt: skip
_NEW = {"EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "EMPTY_TUPLE"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _follow(data: bytes) -> None:
    """Do what a pickle says, but without its values. ValueError for a call that torch could spend memory on."""
    stack: list[_Value] = []
    marked: list[list[_Value]] = []
    memo: dict[int, _Value] = {}
    copied = 0

    for number, (name, argument) in enumerate(_operations(data)):
        if number >= _MAX_OPERATIONS:
            raise ValueError(f"its pickle has more than {_MAX_OPERATIONS} operations")
        if name in _PUSHES:
            if isinstance(argument, str | bytes) and len(argument) > _LONG:
                stack.append(_Value(items=len(argument), is_plain=True, is_done=True))
            else:
                stack.append(_BIG if isinstance(argument, int) and abs(argument) > _LONGEST_PLAIN else _PLAIN)
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in _NEW:
            stack.append(_Value())
        elif name == "MARK":
            marked.append(stack)
            stack = []
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            values, stack = stack, marked.pop()
            if name == "TUPLE":
                stack.append(_tuple_of(values))
            else:
                stack[-1].add(values)
                copied += sum(map(_hashed, values[::2])) if name == "SETITEMS" else 0
        elif name in _TUPLES:
            values = [stack.pop() for _ in range(_TUPLES[name])]
            stack.append(_tuple_of(values[::-1]))
        elif name in ("APPEND", "SETITEM"):
            values = [stack.pop() for _ in range(1 if name == "APPEND" else 2)]
            stack[-1].add(values)
            copied += sum(map(_hashed, values[1:]))
        elif name == "GLOBAL":
            if len(argument) > _MAX_NAME:  # in which torch would search for minutes, for its message
                raise ValueError(f"its pickle names a function or class by {len(argument)} characters")
            stack.append(_Value(argument.replace(" ", ".")))
        elif name in ("REDUCE", "NEWOBJ", "BUILD"):
            given, target = stack.pop(), stack.pop()
            copied += given.hashed if target.name in _HASHING or given.first in _HASHING else given.items
            if name != "BUILD":
                _check_call(target.name, name)
            if target.name == _BY_TYPE:
                _check_call(given.first, name)
            made = target if name == "BUILD" else _Value()
            made.add([given])
            stack.append(made)
        elif name == "BINPERSID":
            stack[-1] = _Value()
        elif name not in ("PROTO", "STOP"):
            raise ValueError(f"its pickle has the operation {name}, which torch.save does not write")
        if copied > _MAX_COPIED:
            raise ValueError(f"its pickle copies or hashes more than {_MAX_COPIED} items of lists and dicts")


def _check_call(name: str, operation: str) -> None:
    if name in _CALLS and operation == "REDUCE":
        return
    if not name or name.partition(".")[0] in ("torch", "builtins", "__builtin__"):
        raise ValueError(f"its pickle calls {name or 'a value'}, which the import of plain tensors does not need")


def _operations(data: bytes) -> Iterator[tuple[str, Any]]:
    return ((operation.name, argument) for operation, argument, _ in pickletools.genops(data))
