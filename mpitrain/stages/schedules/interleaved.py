"""Interleaved 1F1B: several stages on each rank, as many apart as there are ranks."""

from mpitrain.stages.schedules.program import Program
from mpitrain.stages.schedules.schedule import Action, Schedule, Times


def interleaved(num_ranks: int, num_micro: int, stages_per_rank: int = 2) -> Schedule:
    """Idles for 1/v of the time of 1F1B with v stages on each rank, for v times as many messages (2104.04473, section 2.2).

    The micro-batches pass in rounds, each through all stages of a rank. A round has as many micro-batches as ranks, or a few more, so
    that all rounds are equal. ValueError if they cannot be.
    """
    num_rounds = max(1, num_micro // num_ranks)
    if num_micro % num_rounds:
        raise ValueError(
            f"interleaved: {num_micro} micro-batches on {num_ranks} ranks cannot be divided into {num_rounds} equal rounds; "
            f"take a multiple of {num_ranks} micro-batches"
        )
    in_round, num_actions = num_micro // num_rounds, num_micro * stages_per_rank

    def ahead(rank: int) -> int:
        return min((num_ranks - 1 - rank) * 2 + (stages_per_rank - 1) * in_round, num_actions)

    def program(rank: int) -> tuple[Action, ...]:
        made = Program()

        def turn(number: int) -> int:
            return number // in_round % stages_per_rank

        for number in range(num_actions + ahead(rank)):
            if number < num_actions:
                made.forward(turn(number) * num_ranks + rank)
            if number >= ahead(rank):
                made.backward((stages_per_rank - 1 - turn(number - ahead(rank))) * num_ranks + rank)
        return made.actions()

    def idle(times: Times) -> float:
        missing = max(num_ranks - num_micro, 0)  # micro-batches, without which each stage but the last waits longer
        return (num_ranks - 1 + (stages_per_rank - 1) * missing) * times.work / stages_per_rank

    return Schedule(
        "interleaved",
        num_ranks,
        num_micro,
        stages_per_rank,
        program,
        lambda stage: stage % num_ranks,
        idle,
        lambda rank: min(ahead(rank) + 1, num_actions),
    )
