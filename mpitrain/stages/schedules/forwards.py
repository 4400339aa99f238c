"""Forwards alone, for evaluation: any number of micro-batches stream through the stages of a schedule."""

from dataclasses import replace

from mpitrain.stages.schedules.schedule import Action, Schedule


def forwards(schedule: Schedule, num_micro: int) -> Schedule:
    """The forwards of `num_micro` micro-batches, with each stage on the rank that has it in `schedule`.

    In actions of one second, all ranks compute all the time between the first few and the last few micro-batches. In a V, stage s
    computes micro-batch m at second 2m + s. Otherwise the micro-batches pass in rounds of as many as ranks, each through all stages of
    a rank, as in interleaved 1F1B; a last round of fewer micro-batches leaves gaps. `idle` and `peak` are not defined.
    """
    num_ranks, v = schedule.num_ranks, schedule.stages_per_rank
    is_vee = v == 2 and schedule.rank_of(num_ranks) == num_ranks - 1

    def second(action: Action) -> int:
        _, stage, micro = action
        if is_vee:
            return 2 * micro + stage
        return (micro // num_ranks * v + stage // num_ranks) * num_ranks + micro % num_ranks + stage % num_ranks

    def program(rank: int) -> tuple[Action, ...]:
        mine = [stage for stage in range(schedule.num_stages) if schedule.rank_of(stage) == rank]
        return tuple(sorted((Action("F", stage, micro) for stage in mine for micro in range(num_micro)), key=second))

    return replace(schedule, num_micro=num_micro, program=program, idle=lambda times: None, peak=lambda rank: 1)
