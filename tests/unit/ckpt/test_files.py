"""How written bytes are sent to the disk early."""

import os
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ckpt.storage.local import Writeback

MIB, PAGE = 1 << 20, 2 << 20
BLOCKS = st.lists(st.tuples(st.integers(0, 6 * MIB), st.integers(1, 40 * MIB)), max_size=20)


@given(BLOCKS)
def test_only_what_was_written_begins_to_go_and_nothing_twice(blocks):
    begun = []
    real = os.posix_fadvise
    os.posix_fadvise = lambda fd, first, length, advice: begun.append((first, first + length))
    try:
        writeback = Writeback(-1)
        written, end = [], 0
        for gap, length in blocks:
            first, end = end + gap, end + gap + length
            writeback.wrote(first, end)
            written.append((first, end))
            # Whatever has begun, the next block shares no page of the page cache with it.
            assert all(last <= end // PAGE * PAGE for _, last in begun)
    finally:
        os.posix_fadvise = real
    assert all(last <= following for (_, last), (following, _) in pairwise(begun))
    # Small gaps are what lies between blocks; across a large one nothing is claimed to be written.
    holes = [(a, b) for (_, a), (b, _) in pairwise(written) if b - a >= PAGE]
    assert not any(first < b and a < last for first, last in begun for a, b in holes)
    # Little is left for the end of what was written without a large gap.
    left = sum(last - first for first, last in written) - sum(last - first for first, last in begun)
    assert left <= (16 * MIB + PAGE) * (1 + len(holes))
