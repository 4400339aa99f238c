"""Shards of documents: sound ones, and all that the project does with one."""

import io
import json
import tarfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from random import Random

from collectives.texts import shown
from fuzzing import independent
from fuzzing.independent import Sample
from fuzzing.target import Sound
from fuzzing.verdict import fault
from mpitrain.job.data import TarSamples
from mpitrain.job.data.cache import ShardCache
from mpitrain.job.data.documents import Cut, DamagedSampleError, Reader, checked_text, kind_of, open_shard
from mpitrain.job.data.documents.tar.numbers import BLOCK
from mpitrain.job.data.shards import list_shards

_CACHE_BYTES = 1 << 30
_NUM_PARTS = 200


def read_shard(path: Path) -> list[bytes | None] | list[Sample]:
    """Read a shard as runs do, as a whole and in parts. What is read must agree, also with what other programs read.

    Returns the texts, or the samples of a tar file. Raises the first of its damaged documents.
    """
    found, damages = _compared(path)
    if damages:
        del found  # the error keeps what is in this frame
        raise damages[0]
    return found


def _compared(path: Path) -> tuple[list[bytes | None] | list[Sample], list[DamagedSampleError]]:
    """The result of `read_shard`, and the errors of the damaged documents."""
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
    texts = [text for _, text in documents]
    content = independent.unpacked(path.name, path.read_bytes())
    samples: list[Sample] = []
    if kind_of(path.name) == "tar":
        whole, of_samples = _read_samples(path, reader)
        samples, damages = [(key, parts) for key, parts in whole if parts is not None], damages + of_samples
        for (_, parts), text in zip(whole, texts, strict=True):
            if parts is not None and text is not None:
                assert text == (next(iter(parts.values())) if len(parts) == 1 else parts["txt"])
        if content is not None and (others := independent.samples_of(content)) is not None:
            independent.check_samples(whole, others)
    elif kind_of(path.name) == "lines" and content is not None:
        independent.check_texts(texts, independent.lines_of(content))
    elif content is not None and not damages:
        assert b"".join(text or b"" for text in texts) == content
    reader.close()
    return samples or texts, damages


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
    traceback.clear_frames(error.__traceback__)  # which have the document
    return error


def _read_samples(
    path: Path, reader: Reader
) -> tuple[list[tuple[bytes, dict[str, bytes] | None]], list[DamagedSampleError]]:
    """Read the samples of a tar file one by one, which gives what a reader of the whole gives."""
    whole, damages = list[tuple[bytes, dict[str, bytes] | None]](), list[DamagedSampleError]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # entries that are left out
        samples = TarSamples(str(path), dict, cache=str(path.parent.with_name("output")), cache_bytes=_CACHE_BYTES)
        num = len(samples)
    cut = reader.cut(0, 1 << 60)
    assert num == len(cut)
    for index in range(num):
        whole.append((cut.key(index), None))
        try:
            parts = samples[index]
        except DamagedSampleError as error:
            damages.append(_checked(error))
        else:
            del parts["__key__"]
            assert parts == cut.parts(index)  # type: ignore[attr-defined]
            whole[-1] = cut.key(index), parts
    return whole, damages


def records(rng: Random) -> list[dict[str, object]]:
    """Objects with a text."""
    return [{"id": n, "text": f"line {n} \u00e4\u4e16", "more": [n, {"x": None}]} for n in range(rng.randrange(1, 40))]


def line_text(rng: Random, its: Sequence[object]) -> bytes:
    """Records as lines, in one of the forms that programs write."""
    end, mark = rng.choice(["\n", "\r\n", "\n\n", "\r\n \t\r\n", " \n"]), rng.choice(["", "", "\ufeff"])
    texts = [json.dumps(each, ensure_ascii=rng.random() < 0.8) + end for each in its]
    return (mark + "".join(texts)).encode(errors="surrogatepass")


def texts_of(its: Sequence[dict[str, object]]) -> list[bytes | None]:
    """The texts of records."""
    return [str(each["text"]).encode() for each in its]


def packed_parts(rng: Random) -> Sound:
    """The content of a compressed shard: a tar file, JSON Lines, or a text of the same bytes, of which few stand for many."""
    kind = rng.random()
    if kind < 0.02:
        text = b" " * rng.randrange(1 << 20, 32 << 20)
        return Sound({"a.txt": text}, [text])
    if kind < 0.4:
        data, samples = tar(rng)
        return Sound({"a.tar": data}, samples)
    its = records(rng)
    return Sound({"a.jsonl": line_text(rng, its)}, texts_of(its))


def tar(rng: Random) -> tuple[bytes, list[Sample]]:
    """A tar file with all that readers know: samples of parts, links, long names, sparse files, hidden files. And its samples."""
    file = io.BytesIO()
    format = rng.choice([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    samples: dict[bytes, dict[str, bytes]] = {}

    def means(name: str, content: bytes) -> None:
        key, _, part = name.partition(".")
        samples.setdefault(key.encode(), {})[part] = content

    with tarfile.open(fileobj=file, mode="w", format=format) as archive:

        def put(name: str, data: bytes = b"", **fields: object) -> None:
            _add(archive, name, data, **fields)
            means(name, samples[b"0"]["txt"] if "linkname" in fields else data)

        for number in range(rng.randrange(1, 5)):
            put(f"{number}.txt", b"text %d " % number * rng.randrange(1, 200))
            put(f"{number}.json", b"{}" * rng.randrange(2))
        _add(archive, "d", type=tarfile.DIRTYPE)
        put("h.txt", type=tarfile.LNKTYPE, linkname="0.txt")
        put("d/s.txt", type=tarfile.SYMTYPE, linkname="../0.txt")
        _add(archive, "f", type=tarfile.SYMTYPE, linkname="d")
        put("f2.txt", type=tarfile.SYMTYPE, linkname="f/s.txt")
        _add(archive, "._0.txt", b"\0\5\x16\7")
        if format != tarfile.USTAR_FORMAT:
            put("long" * 40 + ".txt", b"long")
            _add(archive, "l.txt", type=tarfile.SYMTYPE, linkname="long" * 40 + ".txt")
            means("l.txt", b"long")
        if format == tarfile.PAX_FORMAT:
            for fields, data, content in _SPARSE:
                records = {f"GNU.sparse.{key}": value for key, value in fields.items()}
                _add(archive, "p.txt", data, pax_headers=records)
                means(fields.get("name", "p.txt"), content)
        if format == tarfile.GNU_FORMAT:
            assert archive.fileobj is not None
            num = rng.choice([2, 4, 9])
            block = _old_sparse(num)
            archive.fileobj.write(block)
            archive.offset += len(block)
            means("o.txt", b"".join(b"x".ljust(1000, b"\0") for _ in range(num)).ljust(10_000, b"\0"))
    return file.getvalue(), list(samples.items())


_SPARSE = (
    (
        {"major": "1", "minor": "0", "name": "a.txt", "realsize": "3000"},
        b"1\n2000\n5\n".ljust(BLOCK, b"\0") + b"begin",
        bytes(2000) + b"begin" + bytes(995),
    ),
    (
        {"map": "0,2,2000,3", "size": "3000", "numblocks": "2", "name": "b.txt"},
        b"abcde",
        b"ab" + bytes(1998) + b"cde" + bytes(997),
    ),
    (
        {"size": "4000", "numblocks": "1", "offset": "1000", "numbytes": "4"},
        b"abcd",
        bytes(1000) + b"abcd" + bytes(2996),
    ),
)
"""Records of pax headers without their begin, what is packed, and the file that this is."""


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
