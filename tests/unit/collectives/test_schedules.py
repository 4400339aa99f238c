"""Every schedule is proved for many sizes and roots; and the prover itself catches schedules that are broken."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from collectives.commands.check import DEFAULT_STEPS
from collectives.schedules import (
    BUILDERS,
    PIPELINED,
    ROOTED,
    TWO_LEVEL,
    Recv,
    Schedule,
    Send,
    Setup,
    Step,
    build,
    goes_in_rounds,
)  # fmt: skip
from collectives.schedules.check import ScheduleError, check, setups
from collectives.schedules.recursive import skips
from collectives.schedules.schedule import Cost, mirrored
from collectives.schedules.trace import trace

NAMES = [(operation, algorithm) for operation, algorithms in BUILDERS.items() for algorithm in algorithms]


@pytest.mark.rest
@pytest.mark.parametrize(("operation", "algorithm"), NAMES)
def test_every_size_is_right_and_costs_what_the_formula_says(operation: str, algorithm: str) -> None:
    for size in range(1, 65):
        for setup in setups(operation, algorithm, size):
            schedule = BUILDERS[operation][algorithm](setup)
            assert (schedule.operation, schedule.algorithm, schedule.size) == (operation, algorithm, size)
            assert check(schedule) == schedule.cost, setup


def test_what_is_proved_for_one_size() -> None:
    assert list(setups("all_reduce", "ring", 12)) == [Setup(12)]
    assert list(setups("reduce", "tree", 12)) == [Setup(12), Setup(12, root=11)]
    assert {setup.per_node for setup in setups("all_reduce", "two_level", 12)} == {1, 2, 3, 4, 6, 12}
    assert len({setup.num_segments for setup in setups("all_reduce", "double_tree", 12)}) >= 3
    assert list(setups("all_gather", "two_level", 1000)) == [Setup(1000, per_node=8)]


@pytest.mark.parametrize(("operation", "algorithm"), NAMES)
def test_what_is_said_to_go_in_rounds_does(operation: str, algorithm: str) -> None:
    for size in range(2, 20):
        programs = [build(operation, algorithm, size).program(rank) for rank in range(size)]
        in_rounds = len({len(program) for program in programs}) == 1 and all(
            (step.send is None or programs[step.send.peer][k].recv.peer == rank)
            and (step.recv is None or programs[step.recv.peer][k].send.peer == rank)
            for rank, program in enumerate(programs)
            for k, step in enumerate(program)
        )
        assert in_rounds or not goes_in_rounds(algorithm, size), size
    assert goes_in_rounds("halving_doubling", 6)
    assert not goes_in_rounds("recursive_doubling", 6)


@pytest.mark.rest
@given(st.data())
def test_every_root_node_and_number_of_segments(data: st.DataObject) -> None:
    operation, algorithm = data.draw(st.sampled_from(NAMES))
    per_node, nodes = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 8))
    size = per_node * nodes
    schedule = build(
        operation,
        algorithm,
        size,
        root=data.draw(st.integers(0, size - 1)),
        per_node=per_node,
        num_segments=data.draw(st.integers(1, 9)),
    )
    assert check(schedule) == schedule.cost


@pytest.mark.parametrize(("operation", "algorithm"), NAMES)
def test_one_rank_has_nothing_to_do(operation: str, algorithm: str) -> None:
    assert build(operation, algorithm, 1).program(0) == ()


@pytest.mark.rest
@pytest.mark.parametrize("size", [100, 257, 1000])
def test_many_ranks(size: int) -> None:
    """Beyond 64 ranks contributions are told apart by random weights."""
    for operation, algorithm in NAMES:
        schedule = BUILDERS[operation][algorithm](next(iter(setups(operation, algorithm, size))))
        if size * schedule.cost.rounds <= DEFAULT_STEPS:
            assert check(schedule) == schedule.cost


@pytest.mark.rest
def test_thousands_of_ranks() -> None:
    """All that `python -m collectives check` proves for 4096 by default, but for those that take it seconds each."""
    slow = {"halving_doubling", "two_level"}
    for operation, algorithm in NAMES:
        schedule = BUILDERS[operation][algorithm](next(iter(setups(operation, algorithm, 4096))))
        if 4096 * schedule.cost.rounds <= DEFAULT_STEPS and algorithm not in slow:
            assert check(schedule) == schedule.cost


def test_formulae_of_the_literature() -> None:
    # by hand: the checker compares with Schedule.cost, so that one needs a witness of its own
    def cost(operation: str, algorithm: str, size: int = 6, **setup: int) -> tuple[int, Fraction]:
        return tuple(build(operation, algorithm, size, **setup).cost)

    sixth = Fraction(1, 6)
    assert cost("all_reduce", "ring") == (10, 10 * sixth)
    assert cost("all_gather", "ring") == cost("reduce_scatter", "ring") == (5, 5 * sixth)
    assert cost("broadcast", "tree") == (3, 3)
    assert cost("reduce", "tree") == (3, 1)
    assert cost("all_reduce", "tree") == (6, 3)
    assert cost("all_reduce", "halving_doubling") == (6, 10 * sixth)
    assert cost("reduce_scatter", "halving") == cost("all_gather", "bruck") == (3, 5 * sixth)
    assert cost("all_reduce", "recursive_doubling", 8) == (3, 3)
    assert cost("all_reduce", "recursive_doubling") == (
        4,
        3,
    )  # in, twice among four, out again: the speaker sends three times
    assert cost("all_gather", "recursive_doubling", 8) == (3, Fraction(7, 8))
    # rank 0 holds 0 1, then 0..3, then all: sends 2 and 4 of the six chunks, and last all but rank 1's own
    assert cost("all_gather", "recursive_doubling") == (4, (2 + 4 + 5) * sixth)
    assert cost("broadcast", "scatter_all_gather") == (6, 10 * sixth)
    assert cost("reduce", "reduce_scatter_gather") == (6, (5 + 2) * sixth)
    assert cost("gather", "tree") == (3, 2 * sixth)
    assert cost("scatter", "tree") == (3, 5 * sixth)
    assert cost("gather", "linear") == (5, sixth)
    assert cost("scatter", "linear") == cost("all_to_all", "pairwise") == (5, 5 * sixth)
    # 4 nodes of 8: twice log2 8 within and log2 4 across; bytes as a ring's
    assert cost("all_reduce", "two_level", 32, per_node=8) == (2 * (3 + 2), Fraction(62, 32))
    # log2 4 rounds across, and log2 8 within before and after each of them
    assert cost("all_gather", "two_level", 32, per_node=8) == (2 + 3 * 3, Fraction(31, 32))
    # 8 ranks: 7 below the root, so 3 edges down, of two rounds each; then a piece comes every second round
    assert cost("broadcast", "double_tree", 8, num_segments=10) == (6 + 18, 1)
    assert cost("all_reduce", "double_tree", 8, num_segments=10) == (2 * (6 + 18), 2)


def test_skips_are_halves_rounded_up() -> None:
    assert list(skips(11)) == [(1, 1), (2, 1), (3, 3), (6, 5)]
    for p in range(1, 200):
        assert sum(count for _, count in skips(p)) == p - 1
        assert len(list(skips(p))) == (p - 1).bit_length()


def test_programs_repeat_after_the_period() -> None:
    """The price of thousands of ranks rests on this."""
    found = set()
    for operation, algorithm in NAMES:
        for size, per_node in ((12, 3), (12, 4), (15, 5), (16, 4), (18, 6), (21, 1)):
            schedule = build(operation, algorithm, size, per_node=per_node)
            if schedule.period is None:
                continue
            found.add((operation, algorithm))
            for rank in range(size):
                assert pattern(schedule, rank) == pattern(schedule, rank % schedule.period), (
                    operation,
                    algorithm,
                    rank,
                )
    assert {("all_reduce", "ring"), ("all_gather", "two_level"), ("all_to_all", "pairwise")} <= found


def pattern(schedule: Schedule, rank: int) -> list[list[tuple[int, int] | None]]:
    """How far on each step's peers are, and how much goes there."""
    return [[part and ((part.peer - rank) % schedule.size, part.count) for part in s] for s in schedule.program(rank)]


def test_a_mirror_image_of_a_mirror_image() -> None:
    for rank in range(6):
        steps = build("all_gather", "bruck", 6).program(rank)
        assert mirrored(mirrored(steps, reduce=True), reduce=False) == steps
    assert build("reduce_scatter", "ring", 5).program(2) == mirrored(
        build("all_gather", "ring", 5).program(2), reduce=True
    )


def test_ranks_of_a_double_tree_never_have_two_messages_at_once() -> None:
    """Each rank passes on one piece while it takes the next: no more steps than pieces, and a few to fill the pipeline."""
    schedule = build("broadcast", "double_tree", 64, num_segments=100)
    for rank in range(1, 64):
        steps = schedule.program(rank)
        assert sorted(step.recv.chunk for step in steps if step.recv) == list(range(200))
        assert sum(step.send is not None for step in steps) <= 200
        assert len(steps) <= 200 + 2 * 6


def test_what_crosses_nodes_in_a_two_level_all_reduce() -> None:
    size, g = 48, 8
    schedule = build("all_reduce", "two_level", size, per_node=g)
    run = trace(schedule)
    across = run.source // g != run.destination // g
    sent = np.bincount(run.source[across], run.count[across], size)
    assert sent.tolist() == [2 * (size // g - 1)] * size, "2 (n-1)/n of a slice for each rank"


@pytest.mark.parametrize(
    ("arguments", "setup", "text"),
    [
        (("sing", "ring", 4), {}, "operation 'sing' is unknown; expected one of all_reduce, all_gather"),
        (("gather", "ring", 4), {}, "gather: algorithm 'ring' is unknown; expected one of tree, linear"),
        (("gather", "tree", 0), {}, "0 ranks with root 0; expected at least one rank, and a root among them"),
        (("gather", "tree", 4), {"root": 4}, "4 ranks with root 4"),
        (("all_reduce", "two_level", 6), {"per_node": 4}, "4 ranks a node; expected a divisor of the 6 ranks"),
        (("all_reduce", "ring", 6), {"per_node": 0}, "0 ranks a node"),
        (("all_reduce", "double_tree", 6), {"num_segments": 0}, "0 segments; expected at least 1"),
    ],
)
def test_build_refuses(arguments: tuple[str, str, int], setup: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build(*arguments, **setup)


def test_build_passes_everything_on() -> None:
    for operation, algorithm in NAMES:
        schedule = build(operation, algorithm, 6, root=4, per_node=3, num_segments=7)
        assert schedule.root == 4
        assert (schedule.num_chunks == 14) == (algorithm in PIPELINED)
        if operation in ROOTED:
            assert schedule.program(4) != build(operation, algorithm, 6).program(4)
        if algorithm in TWO_LEVEL:
            assert schedule.program(4) != build(operation, algorithm, 6, per_node=2).program(4)


# Broken schedules


def with_programs(schedule: Schedule, programs: dict[int, tuple[Step, ...]]) -> Schedule:
    """`schedule` with other steps on some ranks."""
    return replace(schedule, program=lambda rank: programs.get(rank, schedule.program(rank)))


def by_hand(operation: str, programs: list[list[Step]], num_chunks: int = 1, root: int = 0) -> Schedule:
    size = len(programs)
    cost = Cost(0, Fraction(0))
    return Schedule(operation, "by hand", size, root, num_chunks, lambda rank: tuple(programs[rank]), cost)


def assert_broken(schedule: Schedule, match: str) -> None:
    with pytest.raises(ScheduleError, match=match):
        check(schedule)


def test_a_dropped_step_is_a_deadlock() -> None:
    schedule = build("all_reduce", "ring", 5)
    assert_broken(with_programs(schedule, {3: schedule.program(3)[:-1]}), "deadlock: ranks")


def test_receives_that_wait_for_each_other_are_a_deadlock() -> None:
    steps = [[Step(recv=Recv(1, 0, True)), Step(send=Send(1, 0))], [Step(recv=Recv(0, 0, True)), Step(send=Send(0, 0))]]
    assert_broken(by_hand("all_reduce", steps), r"deadlock: ranks \[0, 1\] wait in steps \[0, 0\]")


def test_sends_that_only_buffering_would_save_are_a_deadlock() -> None:
    ring = [[Step(send=Send((r + 1) % 3, r)), Step(recv=Recv((r - 1) % 3, (r - 1) % 3, False))] for r in range(3)]
    assert_broken(by_hand("all_gather", ring, num_chunks=3), "deadlock")


def test_a_swapped_chunk_is_named() -> None:
    schedule = build("reduce_scatter", "ring", 4)
    (send, recv), *rest = schedule.program(2)
    assert send and recv
    swapped = Step(send._replace(chunk=(send.chunk + 2) % 4), recv)
    assert_broken(with_programs(schedule, {2: (swapped, *rest)}), r"rank 3 expects chunk 1 of rank 2, which sends 3")


def test_a_message_of_another_length_is_named() -> None:
    schedule = build("all_gather", "bruck", 4)
    first, (send, recv) = schedule.program(2)
    assert send and recv
    short = Step(send._replace(count=1), recv)
    assert_broken(with_programs(schedule, {2: (first, short)}), r"which sends 2 \(2 and 1 chunks\)")


def test_a_contribution_added_twice_is_named() -> None:
    # rank 0 sends its part to rank 1 twice
    steps = [[Step(send=Send(1, 0))] * 2, [Step(recv=Recv(0, 0, True))] * 2]
    assert_broken(by_hand("reduce", steps, root=1), "rank 1 adds a contribution twice to chunk 0")


def test_a_contribution_overwritten_is_named() -> None:
    steps = [[Step(send=Send(1, 0))], [Step(recv=Recv(0, 0, False))]]
    assert_broken(by_hand("reduce", steps, root=1), r"rank 1 lacks the contributions of ranks \[1\] in chunk 0")


@pytest.mark.parametrize("size", [65, 200])
def test_contributions_lost_or_doubled_among_many_ranks(size: int) -> None:
    schedule = build("reduce", "tree", size)
    steps, child = schedule.program(0), schedule.program(1)
    lost = {0: (Step(recv=Recv(1, 0, False)), *steps[1:])}
    doubled = {0: (*steps, Step(recv=Recv(1, 0, True))), 1: (*child, Step(send=Send(0, 0)))}
    for programs in (lost, doubled):
        assert_broken(
            with_programs(schedule, programs), "rank 0 does not end with every contribution exactly once in chunk 0"
        )


def test_another_order_of_summing_is_named() -> None:
    # rank 0 ends with ((a + b) + d) + c, rank 1 with ((a + b) + c) + d
    exchange = [Step(Send(1 - rank, 0), Recv(1 - rank, 0, True)) for rank in (0, 1)]
    add = [Step(recv=Recv(rank, 0, True)) for rank in range(4)]
    take = Step(recv=Recv(0, 0, False))
    tell = [Step(send=Send(rank, 0)) for rank in range(4)]
    steps = [
        [exchange[0], add[3], add[2], tell[2], tell[3]],
        [exchange[1], add[2], add[3]],
        [tell[1], tell[0], take],
        [tell[0], tell[1], take],
    ]
    assert_broken(by_hand("all_reduce", steps), "ranks 0 and 1 add up chunk 0 in different orders")


def test_garbage_is_neither_sent_nor_added_to() -> None:
    sends_unwritten = [[Step(send=Send(1, 1))], [Step(recv=Recv(0, 1, False))]]
    assert_broken(by_hand("all_gather", sends_unwritten, num_chunks=2), "rank 0 sends chunk 1 before anything")
    adds_to_unwritten = [[Step(Send(1, 0), Recv(1, 1, True))], [Step(Send(0, 1), Recv(0, 0, False))]]
    assert_broken(by_hand("all_gather", adds_to_unwritten, num_chunks=2), "rank 0 adds to chunk 1 before anything")
    adds_what_is_moved = [[Step(send=Send(1, 0))], [Step(recv=Recv(0, 0, False)), Step(recv=Recv(0, 0, True))]]
    adds_what_is_moved[0] *= 2
    assert_broken(by_hand("broadcast", adds_what_is_moved), "rank 1 adds to chunk 0, which is only to be moved")


def test_steps_that_make_no_sense_are_named() -> None:
    def two(step: Step, num_chunks: int = 1) -> Schedule:
        return by_hand("all_reduce", [[step], []], num_chunks)

    assert_broken(two(Step()), "rank 0 has a step that neither sends nor receives")
    assert_broken(
        two(Step(send=Send(2, 0))), "rank 0: 1 chunks from 0 on, with rank 2, are outside 2 ranks and 1 chunks"
    )
    assert_broken(two(Step(send=Send(-1, 0))), "outside")
    assert_broken(two(Step(send=Send(0, 0))), "outside")
    assert_broken(two(Step(recv=Recv(1, 1, True))), "outside")
    assert_broken(two(Step(recv=Recv(1, 0, True, 2))), "outside")
    assert_broken(two(Step(recv=Recv(1, 0, True, 0))), "outside")
    assert_broken(two(Step(Send(1, 0), Recv(1, 0, False))), "rank 0 sends chunk 0 and copies into it in one step")
    around = Step(Send(1, 3, 2), Recv(1, 0, False))
    assert_broken(two(around, num_chunks=4), "rank 0 sends chunk 3 and copies into it in one step")
    assert_broken(by_hand("sideways", [[], []]), "operation 'sideways' has no rule")


@pytest.mark.parametrize("error", [Cost(1, Fraction(0)), Cost(-1, Fraction(0)), Cost(0, Fraction(1, 50))])
def test_another_formula_is_noticed(error: Cost) -> None:
    schedule = build("all_gather", "ring", 5)
    cost = Cost(schedule.cost.rounds + error.rounds, schedule.cost.traffic + error.traffic)
    assert_broken(replace(schedule, cost=cost), "costs 4 rounds and 4/5 of the buffer, but the formula says")


def test_a_detour_is_noticed() -> None:
    """Right, but a byte too many, or a round: rank 1 gets its part of the result a second time."""
    schedule = build("broadcast", "tree", 2)
    twice = {0: schedule.program(0) * 2, 1: schedule.program(1) * 2}
    assert_broken(
        with_programs(schedule, twice), "costs 2 rounds and 2 of the buffer, but the formula says 1 rounds and 1"
    )


@given(st.data())
def test_no_single_change_goes_unnoticed(data: st.DataObject) -> None:
    """Change one step of one rank of a right schedule: it no longer checks."""
    operation, algorithm = data.draw(st.sampled_from(NAMES))
    size = data.draw(st.integers(2, 9))
    per_node = data.draw(st.sampled_from([g for g in range(1, size + 1) if size % g == 0]))
    root, num_segments = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 3))
    schedule = build(operation, algorithm, size, root=root, per_node=per_node, num_segments=num_segments)
    rank = data.draw(st.integers(0, size - 1))
    steps = list(schedule.program(rank))
    assume(steps)
    at = data.draw(st.integers(0, len(steps) - 1))
    send, recv = steps[at]
    other_chunk = data.draw(st.integers(0, schedule.num_chunks))
    other_count = data.draw(st.integers(0, schedule.num_chunks + 1))
    other_peer = data.draw(st.integers(0, size - 1))
    part = data.draw(st.sampled_from([part for part in (send, recv) if part]))
    changes = ["drop", "double", "chunk", "peer", "count"] + ["flip"] * isinstance(part, Recv)
    match data.draw(st.sampled_from(changes)):
        case "drop":
            del steps[at]
        case "double":
            steps.insert(at, steps[at])
        case "chunk":
            assume(part.chunk != other_chunk)
            changed = part._replace(chunk=other_chunk)
        case "peer":
            assume(part.peer != other_peer)
            changed = part._replace(peer=other_peer)
        case "count":
            assume(part.count != other_count)
            changed = part._replace(count=other_count)
        case "flip":
            assert isinstance(part, Recv)
            changed = part._replace(reduce=not part.reduce)
    if len(steps) == len(schedule.program(rank)):
        steps[at] = Step(changed, recv) if part is send else Step(send, changed)
    with pytest.raises(ScheduleError):
        check(with_programs(schedule, {rank: tuple(steps)}))
