"""Parquet files as others write them: large row groups, texts that stand for many, and columns that have one name."""

import random
from pathlib import Path

import numpy as np
import pytest
from some_tensors import forget_peak, peak_bytes

from mpitrain.job.data.documents import DamagedSampleError, DamagedShardError, pages
from mpitrain.job.data.documents.pages import TextExtent
from mpitrain.job.data.documents.parquet import CutLimits, ParquetReader
from mpitrain.job.data.documents.thrift import BINARY, I32, I64, ThriftError, Wanted, read_struct

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

SMALL = CutLimits(piece_bytes=1 << 18, held_bytes=1 << 20, most_bytes=1 << 30)
ENCODINGS = {
    "dictionary": {},
    "plain": {"use_dictionary": False},
    "lengths": {"use_dictionary": False, "column_encoding": {"text": "DELTA_LENGTH_BYTE_ARRAY"}},
    "prefixes": {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
}


def read(reader: ParquetReader) -> list[bytes | None]:
    """All texts, in another order than that of the file."""
    cut = reader.cut(0, 1 << 60)
    order = random.Random(0).sample(range(len(cut)), len(cut))
    found: list[bytes | None] = [None] * len(cut)
    for index in order:
        try:
            found[index] = cut.text(index)
        except DamagedSampleError:
            continue
    return found


@pytest.mark.rest
@pytest.mark.parametrize(("encoding", "version"), list(zip(ENCODINGS, ["1.0", "2.0"] * 2, strict=True)))
def test_a_row_group_with_more_text_than_is_held(tmp_path: Path, encoding: str, version: str) -> None:
    draws = np.random.default_rng(0)
    some = [bytes(draws.integers(32, 127, 9000, np.uint8)).decode() for _ in range(60)]
    texts = [f"{some[n % 60]}{n % 300}" * (n % 3) for n in range(1000)]
    texts[7] = None
    parquet.write_table(
        arrow.table({"n": range(1000), "text": texts}), tmp_path / "a.parquet", compression="zstd", row_group_size=800,
        data_page_version=version, **ENCODINGS[encoding],
    )  # fmt: skip
    expected = [None if text is None else text.encode() for text in texts]
    assert sum(map(len, filter(None, expected))) > 5 * SMALL.held_bytes
    for limits in (SMALL, CutLimits(), CutLimits(piece_bytes=1, held_bytes=0)):
        reader = ParquetReader(tmp_path / "a.parquet", "a.parquet", limits=limits)
        assert read(reader) == expected
        reader.close()
    with pytest.raises(
        DamagedShardError,
        match=r"a.parquet, row group 0: \d+ rows are read at once, .* at most 16777216 rows of 5000000",
    ):
        read(ParquetReader(tmp_path / "a.parquet", "a.parquet", limits=SMALL._replace(most_bytes=5_000_000)))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_small_file_that_stands_for_much_text(tmp_path: Path, encoding: str) -> None:
    path, num = tmp_path / "a.parquet", 200_000 if encoding == "dictionary" else 100
    text = arrow.DictionaryArray.from_arrays(arrow.array([0] * num, arrow.int32()), arrow.array([" " * (1 << 18)]))
    table = arrow.table({"text": text if encoding == "dictionary" else text.dictionary_decode()})
    parquet.write_table(
        table,
        path,
        compression="zstd",
        row_group_size=num,
        store_schema=False,
        write_statistics=False,
        **ENCODINGS[encoding],
    )
    assert path.stat().st_size < 20_000
    limits = CutLimits(piece_bytes=1 << 20, held_bytes=2 << 20, most_bytes=12 << 20)
    before = forget_peak()
    with pytest.raises(
        DamagedShardError, match=r"row group 0: \d+ rows are read at once, 0 of other .* rows of 12582912"
    ):
        read(ParquetReader(path, "a.parquet", limits=limits))
    assert peak_bytes() - before < 12 << 20


def test_no_room_for_a_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet.write_table(arrow.table({"text": ["some text"] * 10}), tmp_path / "a.parquet")
    reader = ParquetReader(tmp_path / "a.parquet", "a.parquet", limits=CutLimits(held_bytes=20))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    text = "a.parquet, row group 0: texts beyond 20 bytes cannot be written into .*missing: No such file .*TMPDIR names another one"
    with pytest.raises(OSError, match=text):
        read(reader)


def test_a_page_that_is_too_large(tmp_path: Path) -> None:
    """As in files that have all rows of a row group in one page."""
    texts = [f"{n} " * 100 for n in range(2000)]
    parquet.write_table(
        arrow.table({"text": texts}), tmp_path / "a.parquet", use_dictionary=False, data_page_size=1 << 30
    )
    num_bytes = sum(map(len, texts))
    small = CutLimits(page_bytes=num_bytes + 8 * len(texts), piece_bytes=num_bytes // 10)
    assert read(ParquetReader(tmp_path / "a.parquet", "a.parquet", limits=small)) == [text.encode() for text in texts]
    text = r"a.parquet, row group 0: the page at byte 4 unpacks from \d+ to \d+ bytes; expected at most 100000, or a quarter of it"
    with pytest.raises(DamagedShardError, match=text):
        read(ParquetReader(tmp_path / "a.parquet", "a.parquet", limits=small._replace(page_bytes=100_000)))
    parquet.write_table(arrow.table({"text": [" " * 90_000]}), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(DamagedShardError, match=r"unpacks from \d\d to 90004 bytes; expected at most 100000"):
        read(ParquetReader(tmp_path / "a.parquet", "a.parquet", limits=small._replace(page_bytes=100_000)))


def test_rows_that_are_decoded_together() -> None:
    draws = random.Random(0)
    for _ in range(300):
        pages = [(draws.randint(1, 50), draws.randint(1, 1000)) for _ in range(draws.randint(1, 20))]  # rows, bytes
        num_rows, most = sum(rows for rows, _ in pages), draws.randint(1, 30_000)
        own, shared = max(size for _, size in pages), draws.choice([0, draws.randint(1, 3000)])
        fewest = min([rows for rows, _ in pages[:-1]] or [num_rows])
        rows = TextExtent(0, shared, own, fewest).rows_within(most)
        page_of = [number for number, (count, _) in enumerate(pages) for _ in range(count)]
        touched = [set(page_of[at : at + rows]) for at in range(num_rows)]
        worst = max(sum(pages[number][1] for number in its) for its in touched)
        assert rows == 1 or worst <= max(most // 2, 3 * own)
        assert rows == 1 or rows * shared <= most // 2


@pytest.mark.parametrize("version", ["1.0", "2.6"])
def test_columns_of_the_usual_form_are_read_as_any_others(tmp_path: Path, version: str) -> None:
    """Of a footer that is sound, and of a thousand that are not."""
    columns = {
        "text": ["some", "text", None, "more"] * 4 + ["x" * 200] * 4,
        "n": range(20),
        "at": [0.5] * 20,
        "is": [True, None] * 10,
    }
    parquet.write_table(
        arrow.table(columns), tmp_path / "a.parquet", row_group_size=5, version=version, use_dictionary=["text", "n"],
        write_page_index=True,
    )  # fmt: skip
    data = (tmp_path / "a.parquet").read_bytes()
    length = int.from_bytes(data[-8:-4], "little")
    footer, any_form = data[-8 - length : -8], pages._COLUMN._replace(usual=lambda data, at: None)
    seen: list[tuple[int, int]] = []

    def usual(data: bytes, at: int) -> None:
        if found := pages._usual_column(data, at):
            assert found == read_struct(data, at, len(data), any_form)
            seen.append((at, found[1]))

    whole = Wanted({4: Wanted({1: any_form._replace(usual=usual), 3: I64})})
    read_struct(footer, 0, length, whole)
    assert len(seen) == 15  # of 16, without one with a text of 200 letters
    draws, sound = random.Random(0), list(seen)
    for _ in range(1000):
        begin, end = draws.choice(sound)
        changed = bytearray(footer)
        changed[draws.randrange(begin, end)] = draws.randrange(256)
        usual(bytes(changed), begin)
    assert len(seen) > 400


@pytest.mark.parametrize(
    ("data", "wanted", "expected"),
    [
        (b"\x15\x02\x15\x04\0", {1: I32}, {1: 1}),
        (b"\x15\x02\x06\x02\x08\0", {1: I32}, {1: 1}),  # field 1 again, of another kind
        (b"\x15\x02\x05\x02\x08\0", {1: I32}, "there twice"),
        (b"\x15\x02\x05\x82\x80\x08\x08\0", {1: I32}, "has the number 65537"),
        (b"\x15\x82\x80\x80\x80\x20\0", {1: I32}, "is 4294967297"),
        (b"\x16\x82\x80\x80\x80\x20\0", {1: I64}, {1: 4294967297}),
        (b"\x16" + b"\xff" * 9 + b"\x01\0", {1: I64}, {1: -1 << 63}),
        (b"\x16" + b"\xff" * 9 + b"\x03\0", {1: I64}, "too long"),
        (b"\x18\x02ab\0", {1: BINARY}, {1: b"ab"}),
        (b"\x18\x02ab\0", {1: I32}, {}),
    ],
)
def test_values_that_pyarrow_reads_as_others_are_errors(data: bytes, wanted: dict[int, int], expected: object) -> None:
    if isinstance(expected, str):
        with pytest.raises(ThriftError, match=expected):
            read_struct(data, 0, len(data), Wanted(wanted))
    else:
        assert read_struct(data, 0, len(data), Wanted(wanted)) == (expected, len(data))


def test_rows_without_text_take_bounded_memory(tmp_path: Path) -> None:
    num = 9 << 20  # as many row groups of pyarrow
    parquet.write_table(arrow.table({"text": arrow.nulls(num, arrow.string())}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 20_000
    few = CutLimits(piece_rows=10_000, most_rows=100_000)
    before = forget_peak()
    with pytest.raises(
        DamagedShardError, match=r"110000 rows are read at once, .* at most 100000 rows .* into more, smaller files"
    ):
        ParquetReader(tmp_path / "a.parquet", "a.parquet", limits=few).cut(0, 1 << 60)
    assert peak_bytes() - before < 12 << 20
    for part in range(9):  # as the error says
        parquet.write_table(arrow.table({"text": arrow.nulls(100_000, arrow.string())}), tmp_path / f"{part}.parquet")
        assert len(ParquetReader(tmp_path / f"{part}.parquet", "a.parquet", limits=few).cut(0, 1 << 60)) == 100_000
    before = forget_peak()
    cut = ParquetReader(tmp_path / "a.parquet", "a.parquet").cut(0, 1 << 60)
    assert len(cut) == num
    assert peak_bytes() - before < 100 << 20
    with pytest.raises(DamagedSampleError, match=r"row 9437183: expected text, got null"):
        cut.text(num - 1)


def test_an_encrypted_column(tmp_path: Path) -> None:
    """The footer is plain. Another column does no harm."""
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Keys(encryption.KmsClient):  # type: ignore[misc]
        def wrap_key(self, key: bytes, name: str) -> str:
            return key.hex()

    factory = encryption.CryptoFactory(lambda connection: Keys())
    table = arrow.table({"text": ["a"] * 9, "id": ["b"] * 9})
    for secret, path in (("text", tmp_path / "a.parquet"), ("id", tmp_path / "b.parquet")):
        settings = encryption.EncryptionConfiguration("f", column_keys={"c": [secret]}, plaintext_footer=True)
        properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), settings)
        with parquet.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
            writer.write_table(table)
    with pytest.raises(DamagedShardError, match=r"^a.parquet: the column is encrypted in row group 0, and encrypted"):
        ParquetReader(tmp_path / "a.parquet", "a.parquet")
    assert read(ParquetReader(tmp_path / "b.parquet", "b.parquet")) == [b"a"] * 9


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    a, b = arrow.array(["a"]), arrow.array(["b"])
    inside = arrow.StructArray.from_arrays([b], ["text"])
    for columns, names, field, text in (
        ([a, b], ["text", "text"], "text", "2 columns are called 'text'"),
        ([a, inside], ["in.text", "in"], "in.text", "2 columns are called 'in.text'"),
        ([inside], ["text"], "text", "expected strings in the column 'text', got struct"),
        ([inside], ["in"], "in.text", "expected a column 'in.text', got in"),
    ):
        parquet.write_table(arrow.table(columns, names=names), tmp_path / "a.parquet")
        with pytest.raises(DamagedShardError, match=f"^a.parquet: {text}"):
            ParquetReader(tmp_path / "a.parquet", "a.parquet", field)
    parquet.write_table(arrow.table([inside, a, b], names=["in", "text", "n"]), tmp_path / "a.parquet")
    assert read(ParquetReader(tmp_path / "a.parquet", "a.parquet")) == [b"a"]


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "large_binary", "string_view", "dictionary"])
def test_every_kind_of_text(tmp_path: Path, kind: str) -> None:
    texts = ["", "one", "zwei \u00e4", "three" * 1000] * 20
    plain = arrow.string() if kind == "dictionary" else getattr(arrow, kind)()
    array = arrow.array([text.encode() if "binary" in kind else text for text in texts], plain)
    array = array.dictionary_encode() if kind == "dictionary" else array
    parquet.write_table(arrow.table({"text": array}), tmp_path / "a.parquet", row_group_size=33)
    for limits in (CutLimits(), SMALL._replace(piece_bytes=5000)):
        assert read(ParquetReader(tmp_path / "a.parquet", "a.parquet", limits=limits)) == [
            text.encode() for text in texts
        ]


def test_row_groups_elsewhere_and_out_of_order(tmp_path: Path) -> None:
    parquet.write_table(arrow.table({"text": [f"row {n}" for n in range(9)]}), tmp_path / "a.parquet", row_group_size=3)
    reader = ParquetReader(tmp_path / "a.parquet", "a.parquet")
    begins = reader._begins.tolist()
    reader._begins = np.array([begins[2], begins[0], begins[1]])  # a file may have its row groups in any order
    rows = [reader.cut(at, at + 1) for at in sorted(begins)]
    assert sorted(cut.key(i) for cut in rows for i in range(len(cut))) == [b"a.parquet:%d" % n for n in range(9)]
    found = parquet.read_metadata(tmp_path / "a.parquet")
    found.set_file_path("a.parquet")
    parquet.write_metadata(found.schema.to_arrow_schema(), tmp_path / "_metadata", metadata_collector=[found])
    with pytest.raises(
        DamagedShardError, match=r"_metadata: row group 0 is in another file, 'a.parquet'; expected that file"
    ):
        ParquetReader(tmp_path / "_metadata", "_metadata")
