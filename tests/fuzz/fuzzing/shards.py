"""Shards of documents: sound ones, and all that the project does with one."""

import io
import json
import tarfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from random import Random

from collectives.texts import shown
from fuzzing.target import Parts
from fuzzing.verdict import fault
from mpitrain.data import TarSamples
from mpitrain.data.cache import ShardCache
from mpitrain.data.documents import Cut, DamagedSampleError, Reader, checked_text, kind_of, open_shard
from mpitrain.data.documents.tar.numbers import BLOCK
from mpitrain.data.shards import list_shards

_CACHE_BYTES = 1 << 30
_NUM_PARTS = 200


def read_shard(path: Path) -> None:
    """Read a shard as runs do, as a whole and in parts, and raise the first of its damaged documents. What is read must agree."""
    shards = list_shards([str(path)])
    cache = ShardCache(path.parent.with_name("output"), limit_bytes=_CACHE_BYTES)
    with cache.local(str(path), int(shards.sizes[0])) as local:
        reader, size = open_shard(local, path.name, kind_of(path.name)), local.stat().st_size
    assert shown(reader.remark) == reader.remark
    documents, damages = _read(reader, 1 << 60)
    keys = [key for key, _ in documents]
    assert len(set(keys)) == len(keys)
    step = max(7, size // _NUM_PARTS)
    assert _read(reader, step, size)[0] == documents
    if kind_of(path.name) == "tar":
        damages += _read_samples(path, reader)
    reader.close()
    if damages:
        raise damages[0]


def _read(
    reader: Reader, step: int, size: int = 1
) -> tuple[list[tuple[bytes, bytes | None]], list[DamagedSampleError]]:
    """The keys and texts of all documents, in parts of `step` bytes, and the errors of those that are damaged."""
    documents: list[tuple[bytes, bytes | None]] = []
    damages = list[DamagedSampleError]()
    for begin in range(0, size, step):
        cut = reader.cut(begin, begin + step)
        for index in range(len(cut)):
            documents.append((cut.key(index), _text(cut, index, damages)))
    return documents, damages


def _text(cut: Cut, index: int, damages: list[DamagedSampleError]) -> bytes | None:
    try:
        return checked_text(cut, index)
    except DamagedSampleError as error:
        damages.append(_checked(error))
        return None


def _checked(error: DamagedSampleError) -> DamagedSampleError:
    """The error of a damaged document, which is one line."""
    problem = fault(error, (DamagedSampleError,))
    assert problem is None, f"{problem}: {error!r:.300}"
    return error


def _read_samples(path: Path, reader: Reader) -> list[DamagedSampleError]:
    """Read the samples of a tar file one by one, which gives what a reader of the whole gives."""
    damages = list[DamagedSampleError]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # entries that are left out
        samples = TarSamples(str(path), dict, cache=str(path.parent.with_name("output")), cache_bytes=_CACHE_BYTES)
        num = len(samples)
    cut = reader.cut(0, 1 << 60)
    assert num == len(cut)
    for index in range(num):
        try:
            parts = samples[index]
        except DamagedSampleError as error:
            damages.append(_checked(error))
        else:
            del parts["__key__"]
            assert parts == cut.parts(index)  # type: ignore[attr-defined]
    return damages


def records(rng: Random) -> list[object]:
    """Objects with a text."""
    return [{"id": n, "text": f"line {n} \u00e4\u4e16", "more": [n, {"x": None}]} for n in range(rng.randrange(1, 40))]


def line_text(rng: Random, its: Sequence[object]) -> bytes:
    """Records as lines, in one of the forms that programs write."""
    end, mark = rng.choice(["\n", "\r\n", "\n\n", "\r\n \t\r\n", " \n"]), rng.choice(["", "", "\ufeff"])
    texts = [json.dumps(each, ensure_ascii=rng.random() < 0.8) + end for each in its]
    return (mark + "".join(texts)).encode(errors="surrogatepass")


def packed_parts(rng: Random) -> Parts:
    """The content of a compressed shard: a tar file, JSON Lines, or a text of the same bytes, of which few stand for many."""
    kind = rng.random()
    if kind < 0.02:
        return {"a.txt": b" " * rng.randrange(1 << 20, 32 << 20)}
    return {"a.tar": tar(rng)} if kind < 0.4 else {"a.jsonl": line_text(rng, records(rng))}


def tar(rng: Random) -> bytes:
    """A tar file with all that readers know: samples of parts, links, long names, sparse files, hidden files."""
    file = io.BytesIO()
    format = rng.choice([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    with tarfile.open(fileobj=file, mode="w", format=format) as archive:
        for number in range(rng.randrange(1, 5)):
            _add(archive, f"{number}.txt", b"text %d " % number * rng.randrange(1, 200))
            _add(archive, f"{number}.json", b"{}" * rng.randrange(2))
        _add(archive, "d", type=tarfile.DIRTYPE)
        _add(archive, "h.txt", type=tarfile.LNKTYPE, linkname="0.txt")
        _add(archive, "d/s.txt", type=tarfile.SYMTYPE, linkname="../0.txt")
        _add(archive, "f", type=tarfile.SYMTYPE, linkname="d")
        _add(archive, "f2.txt", type=tarfile.SYMTYPE, linkname="f/s.txt")
        _add(archive, "._0.txt", b"\0\5\x16\7")
        if format != tarfile.USTAR_FORMAT:
            _add(archive, "long" * 40 + ".txt", b"long")
            _add(archive, "l.txt", type=tarfile.SYMTYPE, linkname="long" * 40 + ".txt")
        if format == tarfile.PAX_FORMAT:
            for number, (fields, data) in enumerate(_SPARSE):
                records = {f"GNU.sparse.{key}": value for key, value in fields.items()}
                _add(archive, f"p{number}.txt", data, pax_headers=records)
        if format == tarfile.GNU_FORMAT:
            assert archive.fileobj is not None
            block = _old_sparse(rng.choice([2, 4, 9]))
            archive.fileobj.write(block)
            archive.offset += len(block)
    return file.getvalue()


_SPARSE = (
    ({"major": "1", "minor": "0", "name": "a.txt", "realsize": "3000"}, b"1\n2000\n5\n".ljust(BLOCK, b"\0") + b"begin"),
    ({"map": "0,2,2000,3", "size": "3000", "numblocks": "2", "name": "b.txt"}, b"abcde"),
    ({"size": "4000", "numblocks": "1", "offset": "1000", "numbytes": "4"}, b"abcd"),
)


def _add(archive: tarfile.TarFile, name: str, data: bytes = b"", **fields: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    archive.addfile(info, io.BytesIO(data))


def _old_sparse(num: int) -> bytes:
    """A sparse file of old GNU, of `num` pieces: with a map in its header, or also in a further block."""
    info = tarfile.TarInfo("o.txt")
    info.size, info.type = num, tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    pairs = b"".join(b"%011o\0%011o\0" % (1000 * place, 1) for place in range(num))
    in_header = pairs[:96]
    header[386 : 386 + len(in_header)] = in_header
    header[482], header[483:495] = num > 4, b"%011o\0" % 10_000
    more = pairs[96:].ljust(BLOCK, b"\0") if num > 4 else b""
    return with_checksum(header) + more + (b"x" * num).ljust(BLOCK, b"\0")


def with_checksum(header: bytes | bytearray) -> bytes:
    """A tar header with the checksum that fits it."""
    blank = bytes(header[:148]) + b" " * 8 + bytes(header[156:])
    return blank[:148] + b"%06o\0 " % sum(blank) + blank[156:]
