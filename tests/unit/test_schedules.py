"""Every schedule is proved for many sizes and roots; and the prover itself catches schedules that are broken."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from collectives.schedules import BUILDERS, Recv, Schedule, Send, Step
from collectives.schedules.check import ScheduleError, check

NAMES = [(operation, algorithm) for operation, algorithms in BUILDERS.items() for algorithm in algorithms]


def build(operation: str, algorithm: str, size: int, root: int = 0) -> Schedule:
    return BUILDERS[operation][algorithm](size, root)


@pytest.mark.parametrize(("operation", "algorithm"), NAMES)
def test_every_size_and_root_is_right_and_costs_what_the_formula_says(operation: str, algorithm: str) -> None:
    for size in range(1, 65):
        for root in {0, 1 % size, size // 2, size - 1}:
            schedule = build(operation, algorithm, size, root)
            assert (schedule.operation, schedule.algorithm, schedule.size) == (operation, algorithm, size)
            assert check(schedule) == schedule.cost, (size, root)


@pytest.mark.parametrize(("operation", "algorithm"), NAMES)
def test_one_rank_has_nothing_to_do(operation: str, algorithm: str) -> None:
    assert build(operation, algorithm, 1).program(0) == ()


@pytest.mark.parametrize("size", [257, 1000])
def test_trees_are_right_for_many_ranks(size: int) -> None:
    for operation in ("broadcast", "reduce", "all_reduce"):
        schedule = build(operation, "tree", size, size // 3)
        assert check(schedule) == schedule.cost


def test_formulae_of_the_literature() -> None:
    # by hand, for 6 ranks: the checker compares with Schedule.cost, so that one needs a witness of its own
    assert build("all_reduce", "ring", 6).cost == (10, Fraction(10, 6))
    assert build("all_gather", "ring", 6).cost == (5, Fraction(5, 6))
    assert build("reduce_scatter", "ring", 6).cost == (5, Fraction(5, 6))
    assert build("broadcast", "tree", 6).cost == (3, 3)
    assert build("reduce", "tree", 6).cost == (3, 1)
    assert build("all_reduce", "tree", 6).cost == (6, 3)


# Broken schedules


def with_programs(schedule: Schedule, programs: dict[int, tuple[Step, ...]]) -> Schedule:
    """`schedule` with other steps on some ranks."""
    return replace(schedule, program=lambda rank: programs.get(rank, schedule.program(rank)))


def by_hand(operation: str, programs: list[list[Step]], num_chunks: int = 1, root: int = 0) -> Schedule:
    cost = build("broadcast", "tree", 1).cost
    size = len(programs)
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


def test_a_contribution_added_twice_is_named() -> None:
    # rank 0 sends its part to rank 1 twice
    steps = [[Step(send=Send(1, 0))] * 2, [Step(recv=Recv(0, 0, True))] * 2]
    assert_broken(by_hand("reduce", steps, root=1), "rank 1 adds a contribution twice to chunk 0")


def test_a_contribution_overwritten_is_named() -> None:
    steps = [[Step(send=Send(1, 0))], [Step(recv=Recv(0, 0, False))]]
    assert_broken(by_hand("reduce", steps, root=1), "rank 1 ends with contributions 1 in chunk 0, expected 11")


def test_garbage_is_neither_sent_nor_added_to() -> None:
    sends_unwritten = [[Step(send=Send(1, 1))], [Step(recv=Recv(0, 1, False))]]
    assert_broken(by_hand("all_gather", sends_unwritten, num_chunks=2), "rank 0 sends chunk 1 before anything")
    adds_to_unwritten = [
        [Step(Send(1, 0), Recv(1, 1, True))],
        [Step(Send(0, 1), Recv(0, 0, False))],
    ]
    assert_broken(by_hand("all_gather", adds_to_unwritten, num_chunks=2), "rank 0 adds to chunk 1 before anything")


def test_steps_that_make_no_sense_are_named() -> None:
    def two(step: Step) -> Schedule:
        return by_hand("all_reduce", [[step], []])

    assert_broken(two(Step()), "rank 0 has a step that neither sends nor receives")
    assert_broken(two(Step(send=Send(2, 0))), r"rank 0: Send\(peer=2, chunk=0\) is outside 2 ranks and 1 chunks")
    assert_broken(two(Step(send=Send(0, 0))), "outside")
    assert_broken(two(Step(recv=Recv(1, 1, True))), "outside")
    assert_broken(two(Step(Send(1, 0), Recv(1, 0, True))), "rank 0 sends and receives chunk 0 in one step")
    assert_broken(by_hand("sideways", [[], []]), "operation 'sideways' has no rule")


@given(st.data())
def test_no_single_change_goes_unnoticed(data: st.DataObject) -> None:
    """Change one step of one rank of a right schedule: it no longer checks."""
    operation, algorithm = data.draw(st.sampled_from(NAMES))
    size = data.draw(st.integers(2, 9))
    schedule = build(operation, algorithm, size, data.draw(st.integers(0, size - 1)))
    rank = data.draw(st.integers(0, size - 1))
    steps = list(schedule.program(rank))
    assume(steps)
    at = data.draw(st.integers(0, len(steps) - 1))
    send, recv = steps[at]
    change = data.draw(
        st.sampled_from(["drop", "double", "send chunk", "send peer", "recv chunk", "recv peer", "flip"])
    )
    other_chunk = data.draw(st.integers(0, schedule.num_chunks))
    other_peer = data.draw(st.integers(0, size - 1))
    match change:
        case "drop":
            del steps[at]
        case "double":
            steps.insert(at, steps[at])
        case "send chunk":
            assume(send and send.chunk != other_chunk)
            steps[at] = Step(Send(send.peer, other_chunk), recv)
        case "send peer":
            assume(send and send.peer != other_peer)
            steps[at] = Step(Send(other_peer, send.chunk), recv)
        case "recv chunk":
            assume(recv and recv.chunk != other_chunk)
            steps[at] = Step(send, recv._replace(chunk=other_chunk))
        case "recv peer":
            assume(recv and recv.peer != other_peer)
            steps[at] = Step(send, recv._replace(peer=other_peer))
        case "flip":
            assume(recv)
            steps[at] = Step(send, recv._replace(reduce=not recv.reduce))
    with pytest.raises(ScheduleError):
        check(with_programs(schedule, {rank: tuple(steps)}))
