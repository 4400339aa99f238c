"""Which rank writes what, into which file, and where there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.format.boxes import Box
from ckpt.format.hdf5 import PAGE_BYTES
from ckpt.saving.placement import BLOCK_BYTES, Item, assign, file_name, files_error, group_ranks, lay_out
from collectives.arrays.dtypes import TABLE

DTYPES = ["float32", "bfloat16", "uint8", "float64"]


@given(st.lists(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, 3000)), max_size=6), min_size=1, max_size=5))
def test_blocks_are_aligned_and_apart(written):
    writers = {
        rank: [Item(f"{rank}.{i}", dtype, Box((0,), (size,))) for i, (dtype, size) in enumerate(items)]
        for rank, items in enumerate(written)
        if items
    }
    file = lay_out("a.h5", writers)
    assert file.ranks == tuple(writers)
    for dtype in DTYPES:
        itemsize = TABLE[dtype].itemsize
        ranges, pages = [], []
        for rank in writers:
            own = [(item.start, item.box.size) for item in file.items[rank] if item.dtype == dtype]
            ranges += own
            pages.append(
                {
                    page
                    for start, size in own
                    for page in range(start * itemsize // PAGE_BYTES, ((start + size) * itemsize - 1) // PAGE_BYTES + 1)
                }
            )
        end = 0
        for start, size in sorted(ranges):
            assert start >= end and start * itemsize % BLOCK_BYTES == 0
            end = start + size
        assert file.elements.get(dtype, 0) == end
        assert sum(map(len, pages)) == len(set().union(*pages)), "two ranks write to one page"


@pytest.mark.rest
@given(
    st.dictionaries(st.text(max_size=4), st.integers(0, 1000)), st.lists(st.integers(0, 1000), min_size=1, max_size=6)
)
def test_assign_is_balanced_and_independent_of_order(nbytes, loads):
    owner = assign(nbytes, loads)
    assert owner == assign(dict(reversed(nbytes.items())), loads)
    total = list(loads)
    for name, rank in owner.items():
        total[rank] += nbytes[name]
    # the fullest rank was the emptiest before its last tensor came, unless it was full from the start
    assert max(total) <= max(max(loads), min(total) + max(nbytes.values(), default=0))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("rank", [0, 1, 2, 3, 4]),
        ("one", [0] * 5),
        ("node", [0, 0, 1, 0, 1]),
        (2, [0, 0, 0, 1, 1]),
        (5, [0, 1, 2, 3, 4]),
        (6, [0, 1, 2, 3, 4]),
        (10**6, [0, 1, 2, 3, 4]),
    ],
)
def test_files(files, expected):
    assert files_error(files) is None
    assert group_ranks(files, ["a", "a", "b", "a", "b"]) == expected


@pytest.mark.parametrize("files", [0, -1, "ranks", None, True, 1.0])
def test_numbers_of_files_that_cannot_be(files):
    assert "expected 'rank', 'node', 'one', or a number of at least 1" in files_error(files)


def test_file_names():
    names = [file_name(files, 3) for files in ("rank", "node", "one", 7)]
    assert names == ["rank-00003.h5", "node-00003.h5", "part-00003.h5", "part-00003.h5"]
