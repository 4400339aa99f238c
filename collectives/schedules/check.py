"""Proves a schedule by walking it symbolically: no elements, only the set of ranks whose contribution each chunk holds.

Sends are taken to wait for their receiver (MPI_Ssend): what ends here ends with any amount of buffering in the MPI library.
"""

from fractions import Fraction

from collectives.schedules.schedule import Cost, Schedule, Step


class ScheduleError(AssertionError):
    """The schedule is wrong: a deadlock, a contribution lost or counted twice, a chunk mistaken for another."""


def check(schedule: Schedule) -> Cost:
    """Walk `schedule`; return what it costs, or raise ScheduleError that says which rank and chunk is wrong and how."""
    size = schedule.size
    held = _initial(schedule)  # held[rank][chunk]: bit r is set where rank r's contribution is in
    programs = [schedule.program(rank) for rank in range(size)]
    position = [0] * size
    begun_at = [0] * size  # the round after which a rank's current step begins
    finished_at = [0] * size  # the round in which the last part of a rank's steps ended
    sent = [0] * size
    # Parts of the current steps that wait for their peer: (source, destination) -> (chunk, contributions, round it was posted in).
    posted: dict[tuple[int, int], tuple[int, int, int]] = {}
    open_parts: list[set[str]] = [set() for _ in range(size)]

    def begin(rank: int) -> None:
        if position[rank] == len(programs[rank]):
            return
        step = programs[rank][position[rank]]
        _check_step(schedule, rank, step)
        begun_at[rank] = finished_at[rank]
        if step.send:
            if not held[rank][step.send.chunk]:
                raise ScheduleError(f"rank {rank} sends chunk {step.send.chunk} before anything stands in it")
            posted[rank, step.send.peer] = (step.send.chunk, held[rank][step.send.chunk], begun_at[rank])
            open_parts[rank].add("send")
            sent[rank] += 1
        if step.recv:
            open_parts[rank].add("recv")

    def end_part(rank: int, part: str, round_: int) -> list[int]:
        """The ranks whose parts may match now that `part` of this rank's step has ended."""
        open_parts[rank].discard(part)
        finished_at[rank] = max(finished_at[rank], round_)
        if open_parts[rank]:
            return []
        position[rank] += 1
        begin(rank)
        step = programs[rank][position[rank]] if position[rank] < len(programs[rank]) else Step()
        return [rank] + ([step.send.peer] if step.send else [])

    for rank in range(size):
        begin(rank)
    waiting = list(range(size))
    while waiting:
        receiver = waiting.pop()
        if "recv" not in open_parts[receiver]:
            continue
        receive = programs[receiver][position[receiver]].recv
        assert receive is not None
        message = posted.get((receive.peer, receiver))
        if message is None:
            continue
        del posted[receive.peer, receiver]
        chunk, contributions, posted_at = message
        if chunk != receive.chunk:
            raise ScheduleError(
                f"rank {receiver} expects chunk {receive.chunk} of rank {receive.peer}, which sends {chunk}"
            )
        if receive.reduce:
            if not held[receiver][chunk]:
                raise ScheduleError(f"rank {receiver} adds to chunk {chunk} before anything stands in it")
            if held[receiver][chunk] & contributions:
                raise ScheduleError(f"rank {receiver} adds a contribution twice to chunk {chunk}")
            contributions |= held[receiver][chunk]
        held[receiver][chunk] = contributions
        round_ = max(posted_at, begun_at[receiver]) + 1
        waiting += end_part(receive.peer, "send", round_) + end_part(receiver, "recv", round_)

    stuck = [rank for rank in range(size) if position[rank] < len(programs[rank])]
    if stuck:
        raise ScheduleError(f"deadlock: ranks {stuck[:8]} wait in steps {[position[r] for r in stuck[:8]]}")
    _check_result(schedule, held)
    return Cost(max(finished_at), Fraction(max(sent), schedule.num_chunks))


def _initial(schedule: Schedule) -> list[list[int]]:
    size, chunks = schedule.size, range(schedule.num_chunks)
    if schedule.operation == "all_gather":
        return [[1 << rank if chunk == rank else 0 for chunk in chunks] for rank in range(size)]
    if schedule.operation == "broadcast":
        return [[1 << rank if rank == schedule.root else 0 for _ in chunks] for rank in range(size)]
    return [[1 << rank for _ in chunks] for rank in range(size)]


def _check_step(schedule: Schedule, rank: int, step: Step) -> None:
    if not (step.send or step.recv):
        raise ScheduleError(f"rank {rank} has a step that neither sends nor receives")
    for part in (step.send, step.recv):
        if part and not (
            0 <= part.peer < schedule.size and part.peer != rank and 0 <= part.chunk < schedule.num_chunks
        ):
            raise ScheduleError(
                f"rank {rank}: {part} is outside {schedule.size} ranks and {schedule.num_chunks} chunks"
            )
    if step.send and step.recv and step.send.chunk == step.recv.chunk:
        raise ScheduleError(f"rank {rank} sends and receives chunk {step.send.chunk} in one step")


def _check_result(schedule: Schedule, held: list[list[int]]) -> None:
    everyone = (1 << schedule.size) - 1
    for rank in range(schedule.size):
        for chunk in range(schedule.num_chunks):
            expected: int | None
            match schedule.operation:
                case "all_reduce":
                    expected = everyone
                case "reduce_scatter":
                    expected = everyone if chunk == rank else None
                case "reduce":
                    expected = everyone if rank == schedule.root else None
                case "all_gather":
                    expected = 1 << chunk
                case "broadcast":
                    expected = 1 << schedule.root
                case other:
                    raise ScheduleError(f"operation {other!r} has no rule for its result")
            if expected is not None and held[rank][chunk] != expected:
                raise ScheduleError(
                    f"{schedule.operation} {schedule.algorithm}, {schedule.size} ranks: rank {rank} ends with contributions "
                    f"{held[rank][chunk]:b} in chunk {chunk}, expected {expected:b}"
                )
