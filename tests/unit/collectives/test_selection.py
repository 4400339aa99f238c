"""Which algorithm runs: what can work where, and what the table says."""

import json
import timeit
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.arrays.dtypes import TABLE
from collectives.schedules import BUILDERS
from collectives.selection import selector
from collectives.selection.selector import (
    ALGORITHMS,
    MAX_COUNT,
    MEMORIES,
    REDUCTIONS,
    SHORT_BYTES,
    Placement,
    Selector,
    kind_of,
)
from collectives.selection.table import KINDS, Table, TableEntry, _break_even, built_in
from collectives.selection.wire import pays

ONE_NODE, TWO_NODES = Placement.of([2]), Placement.of([2, 2])


def chosen(
    operation: str,
    algorithm: str = "auto",
    dtype: str = "float32",
    nbytes: int = 4096,
    memory: str = "private",
    *,
    table: Table | None = None,
    placement: Placement = ONE_NODE,
) -> str:
    selector = Selector(table or built_in(), placement)
    return selector.choose(operation, algorithm, dtype=TABLE[dtype], nbytes=nbytes, memory=memory)


def table_of(
    *choices: Any, operation: str = "all_reduce", memory: str = "private", ranks: int = 2, nodes: int = 1
) -> Table:
    return Table((TableEntry(operation, "native", memory, ranks, nodes, choices),))


# What there is, and what can work


def test_every_schedule_can_be_asked_for() -> None:
    for operation, builders in BUILDERS.items():
        assert set(builders) <= set(ALGORITHMS[operation])
    for operation, algorithms in ALGORITHMS.items():
        for memory in MEMORIES:
            for placement in (ONE_NODE, TWO_NODES):
                possible = Selector(built_in(), placement).feasible(operation, dtype=TABLE["int8"], nbytes=1)
                assert "mpi" in possible
                for algorithm in algorithms:
                    if algorithm in possible:
                        assert chosen(operation, algorithm, memory=memory, placement=placement) == algorithm
                    else:
                        with pytest.raises(ValueError, match=f"{operation}: algorithm '{algorithm}' "):
                            chosen(operation, algorithm, memory=memory, placement=placement)


def test_shared_needs_one_node() -> None:
    assert chosen("all_reduce", "shared", memory="node") == "shared"
    with pytest.raises(ValueError, match=r"algorithm 'shared' works within one node, not on 2; use auto or mpi"):
        chosen("all_reduce", "shared", memory="node", placement=TWO_NODES)


def test_unknown_algorithms_are_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"broadcast: algorithm 'sing' is unknown; expected auto, mpi, "):
        chosen("broadcast", "sing")


def test_an_unknown_operation_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="operation 'foo' is unknown; expected all_reduce, all_gather, "):
        Selector(built_in(), ONE_NODE).feasible("foo", dtype=TABLE["int8"], nbytes=1)


def test_placements_count_their_nodes() -> None:
    assert Placement.of([3]) == (3, 1, 3, 3)
    assert Placement.of([4, 2, 4]) == (10, 3, 2, 4)


def test_what_counts_nodes_wants_several_of_equal_size() -> None:
    def why(sizes: list[int]) -> str | None:
        return selector.obstacle("all_reduce", "two_level", placement=Placement.of(sizes))

    assert why([2, 2]) is None
    assert why([4]) == "works across nodes, and all these ranks are on one"
    assert why([1, 1]) == "needs several ranks on each node, and there is one"
    assert why([4, 2]) == "needs the same number of ranks on each node; here 2 to 4"


def test_a_wire_format_encodes_what_it_makes_smaller() -> None:
    def auto(wire: str, operation: str, dtype: str, op: str | None, size: int = 5000) -> str:
        nbytes = size * TABLE[dtype].itemsize
        selector = Selector(built_in(), TWO_NODES, wire=wire)
        return selector.choose(operation, "auto", dtype=TABLE[dtype], nbytes=nbytes, op=op)

    assert (
        auto("int8", "all_reduce", "float32", "avg") == auto("bf16", "reduce_scatter", "bfloat16", "sum") == "encoded"
    )
    assert auto("int8", "all_gather", "float16", None) == "encoded"
    for unencoded in (
        auto("fp32", "all_reduce", "float32", "sum"),
        auto("int8", "all_reduce", "float32", "max"),
        auto("int8", "all_reduce", "float64", "sum"),
        auto("int8", "all_reduce", "float32", "sum", size=4 * selector.UNENCODED_ELEMENTS),
        auto("int8", "broadcast", "float32", None),
        auto("fp16", "all_gather", "bfloat16", None),
    ):
        assert unencoded != "encoded"
    one_rank_each = Selector(built_in(), Placement.of([1, 1, 1]), wire="fp8")
    assert one_rank_each.choose("all_reduce", "auto", dtype=TABLE["float32"], nbytes=12_292, op="sum") == "encoded"


def test_auto_takes_a_smaller_format_where_it_saves_twenty_times_the_time_of_the_codec() -> None:
    exact, encoded = [0.10, 0.11, 0.10, 0.12, 0.10], [0.05, 0.05, 0.06, 0.04, 0.05]
    assert pays(exact, encoded, codec_s=0.002) and not pays(exact, encoded, codec_s=0.003)
    assert pays(exact, [9.0, *encoded[1:]], codec_s=0.002), "one disturbed round"
    assert not pays(exact, [9.0, 9.0, *encoded[2:]], codec_s=0.002), "it is unclear"
    assert not pays([9.0, *exact[1:]], exact, codec_s=0.002)
    assert not pays(encoded, exact, codec_s=0.0)


def test_what_mpi_cannot_count_goes_by_our_own_algorithms() -> None:
    for dtype in ("uint8", "float32", "bfloat16"):
        largest = MAX_COUNT * TABLE[dtype].itemsize
        for operation in (*REDUCTIONS, "all_gather"):
            assert chosen(operation, "mpi", dtype, largest) == "mpi"
            for placement in (ONE_NODE, TWO_NODES):
                other = chosen(operation, "auto", dtype, largest + TABLE[dtype].itemsize, placement=placement)
                assert other in ALGORITHMS[operation] and other != "mpi"
            with pytest.raises(ValueError, match=r"takes up to 2147483647 elements, not 2147483648; use auto or "):
                chosen(operation, "mpi", dtype, largest + TABLE[dtype].itemsize)
        assert chosen("all_reduce", "auto", "float32", MAX_COUNT * 4, table=table_of((None, "mpi"))) == "mpi"
        assert chosen("all_reduce", "auto", "float32", MAX_COUNT * 4 + 4, table=table_of((None, "mpi"))) != "mpi"
        assert chosen("broadcast", "mpi", dtype, 10 * largest) == "mpi"  # only moved: one large datatype does


# The choice


@given(
    operation=st.sampled_from(list(ALGORITHMS)),
    dtype=st.sampled_from(list(TABLE)),
    memory=st.sampled_from(MEMORIES),
    nbytes=st.integers(0, 1 << 40),
    sizes=st.lists(st.integers(1, 128), min_size=1, max_size=64),
)
def test_auto_chooses_what_can_work_here(
    operation: str, dtype: str, memory: str, nbytes: int, sizes: list[int]
) -> None:
    selector = Selector(built_in(), Placement.of(sizes))
    name = selector.choose(operation, "auto", dtype=TABLE[dtype], nbytes=nbytes, memory=memory)
    assert name in selector.feasible(operation, dtype=TABLE[dtype], nbytes=nbytes)


def test_a_threshold_belongs_to_the_choice_below_it() -> None:
    table = table_of((1000, "tree"), (5000, "mpi"), (None, "ring"))
    sizes = {0: "tree", 1: "tree", 1000: "tree", 1001: "mpi", 5000: "mpi", 5001: "ring", 1 << 40: "ring"}
    assert {nbytes: chosen("all_reduce", nbytes=nbytes, table=table) for nbytes in sizes} == sizes


def test_kinds_of_dtypes() -> None:
    assert [kind_of(operation, TABLE["bfloat16"]) for operation in ("all_reduce", "all_gather")] == ["half", "native"]
    assert kind_of("all_reduce", TABLE["float64"]) == "native"
    entries = [
        TableEntry("all_reduce", kind, "private", 2, 1, ((None, name),))
        for kind, name in zip(KINDS, ("tree", "ring"), strict=True)
    ]
    table = Table(tuple(entries))
    assert [chosen("all_reduce", dtype=dtype, table=table) for dtype in ("int32", "float16")] == ["tree", "ring"]


def test_each_memory_has_choices_of_its_own_or_those_of_private_memory() -> None:
    table = Table((*table_of((None, "tree")).entries, *table_of((None, "shared"), memory="node").entries))
    assert [chosen("all_reduce", memory=memory, table=table) for memory in MEMORIES] == ["tree", "shared"]


def test_an_all_gather_into_the_node_s_one_array_is_always_ordered() -> None:
    """Whatever was measured: nothing but "shared" waits until nobody reads what stood there."""
    table = table_of((None, "ring"), operation="all_gather", memory="node")
    assert chosen("all_gather", memory="node", table=table) == "shared"
    assert chosen("all_gather", memory="private", table=table) == "mpi"


@pytest.mark.parametrize("sizes", [[1, 2], [2, 2], [3, 1, 4]])
@pytest.mark.parametrize("wanted", ["mpi", "ring", "shared"])
def test_a_long_all_gather_over_nodes_into_one_array_of_each_goes_without_a_copy(sizes: list[int], wanted: str) -> None:
    table = table_of((None, wanted), operation="all_gather", nodes=len(sizes))
    placement = Placement.of(sizes)
    assert chosen("all_gather", placement=placement, table=table) == ("mpi" if wanted == "shared" else wanted)
    for nbytes in (0, 100, 128 << 10, (128 << 10) + 4, 1 << 20, 1 << 40):
        name = chosen("all_gather", nbytes=nbytes, memory="node", placement=placement, table=table)
        assert (name == "mpi") == (wanted != "ring" and nbytes <= 128 << 10), nbytes
    assert chosen("all_gather", "mpi", memory="node", placement=placement, table=table) == "mpi", "it was asked for"


def test_the_nearest_numbers_of_ranks_and_nodes_hold() -> None:
    def entry(ranks: int, nodes: int, name: str) -> TableEntry:
        return TableEntry("all_reduce", "native", "private", ranks, nodes, ((None, name),))

    table = Table((entry(2, 1, "mpi"), entry(16, 1, "ring"), entry(4, 2, "tree")))
    for sizes, name in {
        (2,): "mpi",
        (3,): "mpi",
        (8,): "ring",
        (256,): "ring",
        (1, 1): "tree",
        (8,) * 100: "tree",
    }.items():
        assert chosen("all_reduce", table=table, placement=Placement.of(sizes)) == name, sizes
    # on several nodes what one node can do is no measure
    assert chosen("all_reduce", table=Table((entry(2, 1, "ring"),)), placement=TWO_NODES) == "mpi"


def test_thresholds_between_schedules_move_with_their_costs() -> None:
    table = table_of((1000, "tree"), (None, "ring"), ranks=4)
    few, many = (_break_even("all_reduce", "tree", "ring", n) for n in (4, 64))
    assert few is not None and many is not None and many > 4 * few
    moved = round(1000 * many / few)
    placement = Placement.of([64])
    assert [chosen("all_reduce", nbytes=n, table=table, placement=placement) for n in (moved, moved + 1)] == [
        "tree",
        "ring",
    ]
    # what the MPI library does is not known: its thresholds stay
    table = table_of((1000, "mpi"), (None, "ring"), ranks=4)
    assert [chosen("all_reduce", nbytes=n, table=table, placement=placement) for n in (1000, 1001)] == ["mpi", "ring"]
    # two ranks measure no difference between these two, many do
    table = table_of((1000, "tree"), (None, "ring"), ranks=2)
    assert chosen("all_reduce", nbytes=1001, table=table, placement=ONE_NODE) == "ring"
    assert chosen("all_reduce", nbytes=1001, table=table, placement=Placement.of([1024])) == "tree"
    assert chosen("all_reduce", nbytes=1 << 30, table=table, placement=Placement.of([1024])) == "ring"


def test_a_range_that_another_has_overtaken_is_left_out() -> None:
    table = table_of((1000, "tree"), (1200, "ring"), (None, "mpi"), ranks=4)
    placement = Placement.of([64])
    names = [chosen("all_reduce", nbytes=n, table=table, placement=placement) for n in (1000, 2000, 1 << 30)]
    assert names == ["tree", "tree", "mpi"]


def test_the_built_in_table_knows_every_operation() -> None:
    for operation in ALGORITHMS:
        for placement in (ONE_NODE, TWO_NODES):
            for kind in KINDS if operation in REDUCTIONS else ("native",):
                entries = [e for e in built_in().entries if e[:3] == (operation, kind, "private")]
                assert any((entry.nodes > 1) == (placement.num_nodes > 1) for entry in entries), (
                    operation,
                    kind,
                    placement,
                )


def test_a_choice_costs_little() -> None:
    selector, row = Selector(built_in(), ONE_NODE), TABLE["float32"]

    def choose() -> str:
        return selector.choose("all_reduce", "auto", dtype=row, nbytes=4096, memory="private")

    choose()
    assert min(timeit.repeat(choose, number=1000, repeat=30)) / 1000 < 1e-6  # 0.3 us where it was written


# Tables as data


def test_a_table_comes_back_from_json() -> None:
    table = Table(built_in().entries, {"cpu": "one", "nodes": 1})
    assert Table.from_dict(json.loads(table.to_json())) == table
    assert Table.from_dict(json.loads(json.dumps(table.to_dict()))) == table
    assert Table.from_dict({"version": 2, "entries": []}) == Table(())


GOOD = table_of((1000, "tree"), (None, "ring")).to_dict()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ([], r"table: \[\]; expected an object"),
        ({"version": 1}, r"table: version 1; expected 2"),
        ({"entries": {}}, r"table: entries \{\}; expected a list"),
        ({"machine": "mine"}, r"table: machine 'mine'; expected an object or null"),
        ({"entries": GOOD["entries"] * 2}, r"two entries for the same operation"),
        ({"entries": [7]}, r"entries\[0\]: 7; expected an object with operation, kind"),
        ({"operation": "sing"}, r"entries\[0\]: operation 'sing'; expected one of all_reduce, "),
        ({"operation": []}, r"entries\[0\]: operation \[\]; expected one of"),
        ({"kind": "complex"}, r"kind 'complex'; expected one of native, half"),
        ({"memory": "disk"}, r"memory 'disk'; expected one of private, node"),
        ({"ranks": 0}, r"ranks 0; expected a whole number from 1"),
        ({"nodes": True}, r"nodes True; expected a whole number from 1"),
        ({"nodes": 3}, r"2 ranks on 3 nodes"),
        ({"choices": []}, r"choices \[\]; expected a list of \[up to bytes, algorithm\]"),
        ({"choices": [[None]]}, r"choices \[\[None\]\]; expected a list"),
        ({"choices": [[1, "tree"]]}, r"the last choice is up to 1; expected null"),
        ({"choices": [[None, "tree"], [None, "ring"]]}, r"a choice up to None bytes; expected a whole number above 0"),
        (
            {"choices": [[9, "tree"], [9, "mpi"], [None, "ring"]]},
            r"a choice up to 9 bytes; expected a whole number above 9",
        ),
        ({"choices": [[None, "sing"]]}, r"algorithm 'sing'; expected one of mpi, "),
        ({"choices": [[None, {}]]}, r"algorithm \{\}; expected one of mpi, "),
        ({"more": 1}, r"expected an object with operation, kind, memory, ranks, nodes, choices"),
    ],
)
def test_what_is_no_table_is_refused(change: Any, text: str) -> None:
    if isinstance(change, dict) and not set(change) & set(GOOD):
        change = {"entries": [{**GOOD["entries"][0], **change}]}
    with pytest.raises(ValueError, match=text):
        Table.from_dict({**GOOD, **change} if isinstance(change, dict) else change)


def test_one_table_over_another() -> None:
    measured = table_of((None, "ring"), ranks=8)
    both = measured.over(built_in())
    assert chosen("all_reduce", table=both) == "ring"  # also where the built-in one has the very number of ranks
    for operation, memory, placement in (
        ("all_reduce", "node", ONE_NODE),
        ("broadcast", "private", ONE_NODE),
        ("all_reduce", "private", TWO_NODES),
    ):
        assert chosen(operation, memory=memory, placement=placement, table=both) == chosen(
            operation, memory=memory, placement=placement
        )


def test_entries_take_the_place_of_those_for_the_same_ranks() -> None:
    table = table_of((None, "ring")).with_entries(table_of((None, "tree"), ranks=4).entries)
    table = table.with_entries(table_of((None, "mpi")).entries)
    assert [(entry.ranks, entry.choices) for entry in table.entries] == [(2, ((None, "mpi"),)), (4, ((None, "tree"),))]


def test_short_messages_of_what_mpi_cannot_count_take_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selector, "MAX_COUNT", 100)
    table = table_of((None, "mpi"))
    assert chosen("all_reduce", nbytes=400, table=table) == "mpi"
    assert (
        chosen("all_reduce", nbytes=401, table=table)
        == chosen("all_reduce", nbytes=SHORT_BYTES * 2, table=table)
        != "mpi"
    )
