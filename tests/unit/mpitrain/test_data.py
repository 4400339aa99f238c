"""The corpus and the order: what is listed, how it is split, and that every window comes once per epoch, for any N."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.job.data import Batches, HeldoutBatches, Part, read_into, scan
from mpitrain.job.data.order import keys_of, permute, sample_starts


def read(part: Part) -> bytes:
    buffer = np.empty(part.num_tokens, np.uint8)
    read_into(part, buffer)
    return buffer.tobytes()


def write(root: Path, files: dict[str, bytes]) -> str:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(root)


def many(num: int) -> dict[str, bytes]:
    return {f"f{i}.py": bytes([65 + i % 26]) * (i % 5 + 1) for i in range(num)}


# --- corpus ---


def test_the_standard_library() -> None:
    listing = scan(())
    total = listing.train.num_tokens + listing.heldout.num_tokens
    assert 5e6 < total < 50e6
    assert 0.02 < listing.heldout.num_tokens / total < 0.10
    names = [piece.name for piece in (*listing.train.pieces, *listing.heldout.pieces)]
    assert {"ast.py", "json/decoder.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)
    assert not {"test", "tests", "site-packages", "__pycache__"} & {part for name in names for part in Path(name).parts}
    assert scan(()) == listing


def test_files_of_a_folder_in_order_with_separators(tmp_path: Path) -> None:
    root = write(
        tmp_path / "a",
        {
            "b.txt": b"bb",
            "a.py": b"aaa",
            "c/d.py": b"d",
            "empty.py": b"",
            ".hidden.py": b"h",
            ".git/x.py": b"x",
            "__pycache__/y.py": b"y",
            "binary.dat": b"\0\1",
        },
    )
    assert read(scan([root], heldout=0).train) == b"aaa\0bb\0d\0"
    assert read(scan([root], [".py"], heldout=0).train) == b"aaa\0d\0"
    assert read(scan([root], [".dat", ".txt"], heldout=0).train) == b"bb\0\0\1\0"


def test_named_files_are_always_taken_in_the_order_given_and_once(tmp_path: Path) -> None:
    root = write(tmp_path, {"b.dat": b"b\0b", ".a": b"a", "c.py": b"c"})
    paths = [f"{root}/b.dat", f"{root}/.a", root, f"{root}/.a"]
    assert read(scan(paths, [".py"], heldout=0).train) == b"b\0b\0a\0c\0"


def test_split_by_file_does_not_move_files_when_others_come(tmp_path: Path) -> None:
    few = scan([write(tmp_path / "a", many(200))], heldout=0.3)
    more = scan([write(tmp_path / "b", many(300))], heldout=0.3)
    held = {piece.name for piece in few.heldout.pieces}
    train = {piece.name for piece in few.train.pieces}
    assert not held & train and len(held | train) == 200
    assert 30 <= len(held) <= 90  # 60 expected, deviation 6.5
    assert held <= {piece.name for piece in more.heldout.pieces}
    assert train <= {piece.name for piece in more.train.pieces}
    nothing = scan([str(tmp_path / "a")], heldout=0).heldout
    assert nothing.num_tokens == 0 and read(nothing) == b""


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    heldout=st.floats(0, 1, exclude_max=True),
)
def test_few_files_are_split_at_a_tail(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], heldout: float
) -> None:
    files = {f"{i}": bytes([65 + i]) * size for i, size in enumerate(sizes)}
    root = tmp_path_factory.mktemp("few")
    listing = scan([write(root, files)], heldout=heldout)
    train, held = (read(part).replace(b"\0", b"") for part in (listing.train, listing.heldout))
    assert train + held == b"".join(files.values())
    assert len(train) == round(sum(sizes) * (1 - heldout))


def test_fingerprint_changes_with_names_sizes_and_split(tmp_path: Path) -> None:
    listing = scan([write(tmp_path / "a", {"x": b"1", "y": b"2"})])
    same = scan(
        [write(tmp_path / "b", {"x": b"3", "y": b"4"})]
    )  # another folder, other bytes, the same names and sizes
    assert same.fingerprint == listing.fingerprint
    others = [
        scan([write(tmp_path / "c", {"x": b"1", "z": b"2"})]),
        scan([write(tmp_path / "d", {"x": b"1", "y": b"22"})]),
        scan([str(tmp_path / "a")], heldout=0.5),
    ]
    assert len({listing.fingerprint, *(other.fingerprint for other in others)}) == 4


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere does not exist"):
        scan([str(tmp_path / "nowhere")])


def test_a_path_that_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is neither a file nor a folder"):
        scan([str(tmp_path / "pipe")])


def test_nothing_found_says_where(tmp_path: Path) -> None:
    root = write(tmp_path, {"a.txt": b"", "b.dat": b"\0"})
    with pytest.raises(ValueError) as caught:
        scan([root])
    left_out = f"{root} has 1 file of other formats than text, left out, the first one b.dat"
    assert str(caught.value) == f"data.path: expected text files that are not empty, found none in {root}; {left_out}"
    with pytest.raises(ValueError, match=r"expected files ending in \.c, \.h"):
        scan([root], [".c", ".h"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_files_are_named(tmp_path: Path) -> None:
    root = write(tmp_path, {"a.py": b"a"})
    (tmp_path / "a.py").chmod(0)
    with pytest.raises(ValueError, match=r"a\.py cannot be read: .*ermission denied"):
        scan([root])


def test_files_that_change_after_the_listing(tmp_path: Path) -> None:
    listing = scan([write(tmp_path, {"a.py": b"aaa"})], heldout=0)
    (tmp_path / "a.py").write_bytes(b"aaaa")
    with pytest.raises(ValueError, match=r"a\.py changed its size"):
        read(listing.train)
    (tmp_path / "a.py").unlink()
    with pytest.raises(ValueError, match=r"a\.py cannot be read: No such file"):
        read(listing.train)


def test_buffers_that_do_not_fit(tmp_path: Path) -> None:
    part = scan([write(tmp_path, {"a.py": b"aaa"})], heldout=0).train
    for buffer in (np.empty(3, np.uint8), np.empty(4, np.int8), np.empty((4, 1), np.uint8), np.empty(8, np.uint8)[::2]):
        with pytest.raises(ValueError, match=r"buffer: expected contiguous uint8 of shape \(4,\)"):
            read_into(part, buffer)


def test_a_share_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"data\.heldout: expected at least 0 and less than 1, got 1"):
        scan((), heldout=1.0)


# --- order ---

KEYS = st.lists(st.integers(0, 2**64 - 1), min_size=6, max_size=6).map(lambda keys: np.array(keys, np.uint64))


@settings(deadline=None)
@given(num=st.integers(1, 3000), keys=KEYS)
def test_permute_is_a_bijection(num: int, keys: np.ndarray) -> None:
    images = permute(np.arange(num), num, keys)
    assert images.dtype == np.int64
    assert np.array_equal(np.sort(images), np.arange(num))
    assert np.array_equal(images[:1], permute(np.arange(1), num, keys)), "all and one are computed in two ways"


def test_permute_of_many_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    indices = np.arange(1000).reshape(10, 100)
    whole = permute(indices, 1000, keys_of(0, "a"))
    monkeypatch.setattr("mpitrain.job.data.order._AT_A_TIME", 64)
    assert np.array_equal(permute(indices, 1000, keys_of(0, "a")), whole)


@settings(deadline=None)
@given(num=st.integers(1, 2**40), keys=KEYS, data=st.data())
def test_permute_of_some_indices_of_a_large_range(num: int, keys: np.ndarray, data: st.DataObject) -> None:
    indices = np.unique(data.draw(st.lists(st.integers(0, num - 1), max_size=20).map(lambda x: np.array(x, np.int64))))
    images = permute(indices, num, keys)
    assert len(np.unique(images)) == len(indices)
    assert ((images >= 0) & (images < num)).all()
    assert np.array_equal(images[::-1], permute(indices[::-1], num, keys))


@pytest.mark.rest
def test_permute_takes_every_order_about_as_often() -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**64, (6000, 6), dtype=np.uint64)
    orders = np.array([permute(np.arange(3), 3, k) for k in keys])
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 6 and (abs(counts - 1000) < 150).all()  # deviation 29: 5 of it


def numbered(num: int) -> np.ndarray:
    """Tokens that mostly tell where they stand."""
    return np.random.default_rng(0).integers(0, 256, num).astype(np.uint8)


@pytest.mark.rest
@settings(deadline=None)
@given(context=st.integers(1, 9), extra=st.integers(0, 8), num_windows=st.integers(1, 40), seed=st.integers(0, 9))
def test_every_window_once_per_epoch(context: int, extra: int, num_windows: int, seed: int) -> None:
    tokens = np.arange((num_windows + 1) * context + extra, dtype=np.int64).astype(np.uint8)  # at most 377
    batches = Batches(tokens, context=context, batch=1, seed=seed)
    assert batches.num_windows == num_windows + extra // context
    for epoch in range(3):
        first = epoch * batches.num_windows
        rows = np.concatenate([batches.get(first + i, range(1)) for i in range(batches.num_windows)])
        assert rows.shape == (batches.num_windows, context + 1) and rows.dtype == np.int64
        assert (np.diff(rows, axis=1) % 256 == 1).all()  # each row is a run of neighbouring tokens
        starts = np.sort(rows[:, 0]) if len(tokens) <= 256 else None
        assert starts is None or (np.diff(starts) == context).all()


@settings(deadline=None)
@given(
    ranks=st.integers(1, 7),
    each=st.integers(1, 5),
    step=st.integers(0, 10**7),
    seed=st.integers(0, 2**63),
    data=st.data(),
)
def test_slices_of_ranks_are_the_global_batch(ranks: int, each: int, step: int, seed: int, data: st.DataObject) -> None:
    batch = ranks * each
    tokens = numbered(data.draw(st.integers((batch + 1) * 8, 2000 + 8 * batch)))
    batches = Batches(tokens, context=8, batch=batch, seed=seed)
    slices = [batches.get(step, range(rank * each, (rank + 1) * each)) for rank in range(ranks)]
    assert np.array_equal(np.concatenate(slices), batches.get(step, range(batch)))
    again = Batches(tokens, context=8, batch=batch, seed=seed)
    assert np.array_equal(again.get(step, range(batch)), batches.get(step, range(batch)))


def test_order_and_cuts_differ_between_epochs_and_seeds() -> None:
    tokens = numbered(65 * 16)
    batches = Batches(tokens, context=16, batch=64, seed=0)
    first, second = batches.get(0, range(64)), batches.get(1, range(64))
    other = Batches(tokens, context=16, batch=64, seed=1).get(0, range(64))
    for rows in (first, second, other):
        assert len({row.tobytes() for row in rows}) == 64
    assert not np.array_equal(first, second) and not np.array_equal(first, other)
    starts = [
        sample_starts(np.arange(64) + 64 * epoch, seed=0, num_windows=64, context=16, num_shifts=16)
        for epoch in range(40)
    ]
    shifts = [set((s % 16).tolist()) for s in starts]
    assert all(len(s) == 1 for s in shifts) and len(set.union(*shifts)) > 8  # 40 draws of 16


def test_the_order_stays_what_it_is() -> None:
    # A resumed run must go on with the order it began with: these numbers change only on purpose.
    batches = Batches(np.arange(250, dtype=np.uint8), context=10, batch=8, seed=5)
    assert batches.get(3, range(8))[:, 0].tolist() == [103, 23, 33, 203, 173, 43, 123, 113]


def test_shortest_training_data() -> None:
    for num in (5, 7, 8, 11):
        batches = Batches(np.arange(num, dtype=np.uint8), context=4, batch=1, seed=0)
        rows = {batches.get(step, range(1))[0, 0] for step in range(60)}
        assert rows == set(range(min(4, num - 4)))
    with pytest.raises(ValueError, match="a window of 4 tokens needs 5 training tokens, got 4"):
        Batches(np.zeros(4, np.uint8), context=4, batch=3, seed=0)


@pytest.mark.parametrize(("num", "lacks"), [(5, True), (15, True), (16, False)])
def test_a_batch_of_few_data_has_windows_of_several_epochs(num: int, lacks: bool) -> None:
    """3 windows of 4 tokens: each epoch has all windows once, also if it ends in a batch."""
    batches = Batches(np.arange(num, dtype=np.uint8), context=4, batch=3, seed=0)
    assert bool(batches.lacks) is lacks
    assert batches.lacks in ("", f"the 3 windows of a batch overlap in the {num} training tokens")
    rows = np.concatenate([batches.get(step, range(3)) for step in range(20)])
    assert (np.diff(rows, axis=1) == 1).all() and rows.max() < num
    for epoch in range(60 // batches.num_windows):
        starts = rows[epoch * batches.num_windows : (epoch + 1) * batches.num_windows, 0]
        assert (
            len(set((starts - starts.min()).tolist())) == batches.num_windows
            and not ((starts - starts.min()) % 4).any()
        )


def test_rows_outside_the_batch() -> None:
    batches = Batches(np.zeros(100, np.uint8), context=4, batch=3, seed=0)
    assert batches.get(0, range(2, 2)).shape == (0, 5)
    with pytest.raises(ValueError, match="expected rows from 0 to 2, got 2 to 3"):
        batches.get(0, range(2, 4))


def test_tokens_of_another_type() -> None:
    with pytest.raises(ValueError, match="tokens: expected one dimension of uint8, got int64"):
        Batches(np.zeros(100, np.int64), context=4, batch=1, seed=0)


@settings(deadline=None)
@given(num=st.integers(0, 400), context=st.integers(1, 9), batch=st.integers(1, 4), wanted=st.integers(1, 9))
def test_heldout_windows_are_spread_and_do_not_overlap_unless_they_must(
    num: int, context: int, batch: int, wanted: int
) -> None:
    tokens = np.arange(num).astype(np.uint8)
    batches = HeldoutBatches(tokens, context=context, batch=batch, num_batches=wanted)
    assert bool(batches.lacks) is (num < batch * context + 1)
    if num <= context:
        assert batches.num_batches == 0 and "so there are no evaluations" in batches.lacks
        return
    assert batches.num_batches == max(1, min(wanted, (num - 1) // context // batch))
    rows = np.concatenate([batches.get(i, range(batch)) for i in range(batches.num_batches)])
    assert rows.shape == (batches.num_batches * batch, context + 1)
    assert (np.diff(rows, axis=1) % 256 == 1).all()
    if not batches.lacks:
        assert (np.diff(rows[:, 0]) % 256 >= min(context, 255)).all()
    elif batch > 1:
        assert (rows[0, 0], rows[-1, -1]) == (0, (num - 1) % 256), "from the first held-out token to the last one"
    with pytest.raises(ValueError, match="expected an evaluation batch from 0"):
        batches.get(batches.num_batches, range(1))


def test_no_evaluation_needs_no_heldout_tokens() -> None:
    batches = HeldoutBatches(np.empty(0, np.uint8), context=4, batch=2, num_batches=0)
    assert (batches.num_batches, batches.lacks) == (0, "")


def test_another_batch_size_goes_on_where_the_data_were() -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 4000, dtype=np.uint8)
    before = Batches(tokens, context=10, batch=6, seed=1)
    after = Batches(tokens, context=10, batch=4, seed=1)
    after.go_on(2, before.next_sample(2))
    seen = np.concatenate(
        [before.get(0, range(6)), before.get(1, range(6)), after.get(2, range(4)), after.get(3, range(4))]
    )
    expected = np.concatenate([before.get(step, range(6)) for step in range(4)])
    assert np.array_equal(seen, expected[: len(seen)])
    assert after.next_sample(4) == 20
