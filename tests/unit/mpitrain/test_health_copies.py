"""Checksums of bits, the rows that ranks have in common, and the judgement about copies that differ."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.job.health.checksums import BLOCK, Checksum, block_sums, checksums, flipped_bit
from mpitrain.job.health.pieces import TensorRows, common_rows, index_in_whole
from mpitrain.job.health.verdict import Verdict, judge, together

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.int8,
    torch.bool,
    torch.uint8,
    torch.float16,
]


def random_tensor(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    raw = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, np.uint8)
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(raw % 2 if dtype is torch.bool else raw).view(dtype)


@settings(max_examples=60, deadline=None)
@given(
    count=st.one_of(st.integers(0, 40), st.integers(0, 5 * BLOCK)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_each_flipped_bit_changes_the_checksum_and_is_named(
    count: int, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    x = random_tensor(count, dtype, seed)
    (before,) = checksums([x])
    assert checksums([x.clone()]) == [before]
    num_bits = count * dtype.itemsize * 8
    if not num_bits:
        assert before == Checksum(0, 0)
        return
    bit = data.draw(st.integers(0, num_bits - 1))
    raw = x.view(torch.uint8).numpy()
    raw[bit // 8] ^= np.uint8(1 << bit % 8)
    (after,) = checksums([x])
    assert flipped_bit(before, after) == bit % 64
    assert before.plain != after.plain


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 3 * BLOCK), offset=st.integers(0, 5), dtype=st.sampled_from(DTYPES))
def test_the_place_in_memory_does_not_matter(count: int, offset: int, dtype: torch.dtype) -> None:
    around = random_tensor(count + 8, dtype, 1)
    moved = around[offset : offset + count]
    assert checksums([moved]) == checksums([moved.clone()])
    assert sum(block_sums(moved)) % 2**64 == checksums([moved])[0].plain


def test_large_tensors_and_rows_of_others_have_the_sum_of_their_words() -> None:
    """The sums by torch, by NumPy and by hand agree."""
    for words in (7, BLOCK, 31 * BLOCK + 5, 33 * BLOCK + 5):
        x = random_tensor(words, torch.float64, words)
        values = [int(value) for value in x.numpy().view(np.int64)]
        count = words // BLOCK
        terms = [sum(values[i * BLOCK : (i + 1) * BLOCK]) for i in range(count)] + values[count * BLOCK :]
        weighted = sum((i + 1) * term for i, term in enumerate(terms))
        assert checksums([x]) == [Checksum(sum(values) % 2**64, weighted % 2**64)]
    table = random_tensor(60, torch.float32, 0).view(6, 10)
    assert checksums([table[:, 2:5]]) == checksums([table[:, 2:5].clone()])


def test_two_flips_that_cancel_in_the_plain_sum() -> None:
    x = torch.zeros(10 * BLOCK, dtype=torch.int64)
    x[0] = 1
    y = torch.zeros_like(x)
    y[2 * BLOCK] = 1
    (one,), (other,) = checksums([x]), checksums([y])
    assert one.plain == other.plain and one != other and flipped_bit(one, other) is None


@pytest.mark.parametrize("change", [0, 3, 5, 2**64 - 3])
def test_other_changes_are_no_single_flip(change: int) -> None:
    assert flipped_bit(Checksum(10, 0), Checksum((10 + change) % 2**64, 0)) is None


RANGES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted), max_size=3)


@given(st.lists(RANGES, min_size=1, max_size=5))
def test_common_rows_are_those_that_each_two_ranks_hold(ranges: list[list[list[int]]]) -> None:
    held = [[TensorRows("w", (), begin, end) for begin, end in its] for its in ranges]
    found = common_rows(held)
    holders = [{rank for rank, its in enumerate(ranges) if any(b <= row < e for b, e in its)} for row in range(12)]
    of_row: dict[int, tuple[int, ...]] = {}
    for rows, ranks in found:
        assert len(ranks) > 1
        for row in range(rows.begin, rows.end):
            assert row not in of_row
            of_row[row] = ranks
    assert of_row == {row: tuple(sorted(its)) for row, its in enumerate(holders) if len(its) > 1}


def test_rows_of_other_tensors_or_boxes_are_not_copies() -> None:
    here, there = (((0, 0), (4, 2)),), (((0, 2), (4, 2)),)
    assert (
        common_rows([[TensorRows("w", here, 0, 4)], [TensorRows("w", there, 0, 4)], [TensorRows("v", here, 0, 4)]])
        == []
    )


def test_the_index_in_the_whole() -> None:
    """Two boxes of a matrix of 12 columns: query and key of one of two ranks."""
    whole = torch.arange(5 * 12).view(5, 12)
    boxes = ((0, 3), (5, 3)), ((0, 9), (5, 3))
    part = torch.cat([whole[:, 3:6], whole[:, 9:12]], 1)
    for row in range(5):
        for column in range(6):
            assert whole[index_in_whole(boxes, (row, column))] == part[row, column]
    assert index_in_whole((((2, 0), (3, 4)),), (1, 3)) == (3, 3)


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 3), min_size=1))
def test_a_minority_is_named_and_else_all(values: dict[int, int]) -> None:
    verdict = judge(values)
    counts = {value: list(values.values()).count(value) for value in values.values()}
    most = max(counts.values())
    if len(counts) == 1:
        assert verdict is None
    elif 2 * most > len(values):
        wrong = tuple(sorted(rank for rank, value in values.items() if counts[value] < most))
        assert verdict == Verdict(wrong, True)
    else:
        assert verdict == Verdict(tuple(sorted(values)), False)


def test_one_wrong_rank_explains_its_pairs() -> None:
    clear, pair, other = Verdict((2,), True), Verdict((1, 2), False), Verdict((0, 3), False)
    assert together([pair, clear]) == Verdict((2,), True)
    assert together([pair, other]) == Verdict((0, 1, 2, 3), False)
    assert together([pair, clear, other]) == Verdict((0, 2, 3), False)
