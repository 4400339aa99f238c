"""Slices of a global batch: the tree of additions, and the turns of the ranks."""

import pytest
import torch

from mpitrain.job.config import ConfigError, check_ranks, parse
from mpitrain.sharding.slices import Round, Slices
from mpitrain.sharding.slices.tree import TreeSum, add_subtree, subtrees, tree_sum

_CPU = torch.device("cpu")


def _reference(leaves: torch.Tensor) -> torch.Tensor:
    """Level by level, each node from its two children."""
    while len(leaves) > 1:
        leaves = leaves[::2] + leaves[1::2]
    return leaves[0]


@pytest.mark.parametrize("count", [1, 2, 8, 16])
@pytest.mark.parametrize("numel", [0, 7, 65_537])  # the last: more than one block
def test_a_tree_adds_the_same_pairs_however_many_leaves_come_at_a_time(count: int, numel: int) -> None:
    generator = torch.Generator().manual_seed(count)
    leaves = torch.randn(count, numel, generator=generator) * 10 ** torch.randn(count, 1, generator=generator)
    given, expected = leaves.clone(), _reference(leaves) / count
    for at_a_time in range(1, count + 1):
        tree = TreeSum(numel, torch.float32, _CPU)
        for _ in range(2):  # the second step begins anew
            for begin in range(0, count, at_a_time):
                tree.add(list(leaves[begin : begin + at_a_time]))
            assert torch.equal(tree.take(1 / count), expected)
    assert torch.equal(leaves, given)
    one_after_the_other = leaves.cumsum(0)[-1:] / count
    assert count < 8 or numel < 8 or not torch.equal(one_after_the_other[0], expected), "another order has other bits"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_ranks", "on_node"), [(2, 2), (3, 3), (4, 2), (5, 2), (7, 4), (8, 3), (8, 4)])
def test_the_sums_of_nodes_have_the_bits_of_the_tree(num_ranks: int, on_node: int, dtype: torch.dtype) -> None:
    leaves = torch.randn(8, 33, generator=torch.Generator().manual_seed(4)).to(dtype)
    slices, tree = Slices(8, num_ranks, 0), TreeSum(33, torch.float32, _CPU)
    neighbours = [(begin, min(begin + on_node, num_ranks)) for begin in range(0, num_ranks, on_node)]
    for number in range(slices.num_rounds):
        of_round = leaves[number * num_ranks : (number + 1) * num_ranks]
        runs, sums = slices.subtrees(number, neighbours), []
        assert [rank for run in runs for rank in range(*run)] == list(range(len(of_round)))
        for begin, end in runs:
            sums.append(torch.empty(33))
            add_subtree(sums[-1], list(of_round[begin:end]))
        tree.add(sums, [(end - begin).bit_length() - 1 for begin, end in runs])
        if len(of_round) == num_ranks and (num_ranks, on_node) in [(2, 2), (4, 2), (8, 4)]:
            assert len(runs) == num_ranks // on_node, "one sum for each node"
    assert torch.equal(tree.take(1.0), _reference(leaves.float()))


def test_complete_subtrees() -> None:
    assert subtrees(0, 8) == [(0, 8)]
    assert subtrees(3, 6) == [(3, 4), (4, 6)]
    assert subtrees(5, 16) == [(5, 6), (6, 8), (8, 16)]
    assert subtrees(0, 7) == [(0, 4), (4, 6), (6, 7)]
    assert subtrees(4, 4) == subtrees(4, 3) == []


def test_leaves_of_short_dtypes_are_added_in_fp32() -> None:
    leaves = torch.randn(4, 99, generator=torch.Generator().manual_seed(1)).bfloat16()
    tree = TreeSum(99, torch.float32, _CPU)
    tree.add(list(leaves))
    assert torch.equal(tree.take(1.0), _reference(leaves.float()))


def test_a_tree_keeps_one_sum_of_each_level_at_most() -> None:
    tree = TreeSum(3, torch.float32, _CPU)
    most = 0
    for _ in range(64):
        tree.add([torch.ones(3)])
        most = max(most, len(tree._nodes))
    assert most == 6
    assert tree.take(1.0).tolist() == [64.0] * 3


def test_numbers_are_added_in_the_same_order_as_tensors() -> None:
    values = torch.randn(16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert tree_sum(values.tolist()) == _reference(values).item()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_each_slice_has_one_rank_and_all_ranks_take_part_in_all_rounds(num_ranks: int) -> None:
    of_ranks = [Slices(8, num_ranks, rank) for rank in range(num_ranks)]
    rounds = [slices.rounds for slices in of_ranks]
    assert {len(its) for its in rounds} == {of_ranks[0].num_rounds}
    in_order = [its[n] for n in range(len(rounds[0])) for its in rounds]
    assert [each.number for each in in_order if each.counts] == list(range(8))
    for number in range(len(rounds[0])):
        counts = [its[number].counts for its in rounds]
        assert sum(counts) == of_ranks[0].num_leaves(number)
        assert counts == sorted(counts, reverse=True), "the first ranks"
    assert all(Round(each.number, True) in its for its in rounds for each in its), "a rank repeats a slice of its own"


@pytest.mark.parametrize(
    ("words", "num_ranks", "said"),
    [
        ("--train.slices 6", 1, "expected a power of two, or 0, got 6"),
        ("--train.slices 8", 1, "12 sequences do not make 8 equal slices"),
        ("--train.slices 4 --train.accumulate 3", 1, "the slices are the micro-batches"),
        ("--train.slices 4", 5, "5 ranks with different data cannot share 4.*so 8 or a larger power"),
        ("--train.slices 4 --parallel.wire int8", 2, "with parallel.wire int8 bits depend on the number of ranks"),
        (
            "--train.slices 4 --parallel.stage 0 --parallel.compress top_k",
            2,
            "with parallel.compress top_k bits depend",
        ),
        (
            "--train.slices 4 --parallel.pipeline 2 --parallel.schedule dualpipe-v",
            4,
            r"expected at least .* = 4 micro-batches, got 2; the micro-batches are the slices of a rank: 2 of train.slices 4",
        ),
    ],
)
def test_settings_that_do_not_fit_slices(words: str, num_ranks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_ranks(parse(words.split()), num_ranks)


def test_ranks_need_not_divide_the_batch() -> None:
    check_ranks(parse(["--train.slices", "4", "--train.batch", "12"]), 3)
