"""Schedules in the shape of a V: rank r of P has stages r and 2P - 1 - r, so rank 0 has the first and the last stage."""

from functools import partial

from mpitrain.stages.schedules.program import Program
from mpitrain.stages.schedules.schedule import Action, Schedule, Times


def zero_bubble_v(num_ranks: int, num_micro: int) -> Schedule:
    """No idle time if the three kinds of actions take equally long, with the activations of 1F1B on its first rank on each rank.

    Qi et al. 2023, 2401.10241, section 6. The order is made for at least 2P - 1 micro-batches; actions of others are left out.
    """
    planned = max(2 * num_ranks - 1, num_micro)

    def program(rank: int) -> tuple[Action, ...]:
        made, down, up = Program(), rank, 2 * num_ranks - 1 - rank

        def whole_backward(stage: int) -> None:
            made.backward(stage, split=True)
            made.weights(stage)

        for _ in range(2 * (num_ranks - rank) - 1):
            made.forward(down)
        for _ in range(rank):
            made.forward(up)
            made.forward(down)
        for _ in range(num_ranks - rank):
            made.forward(up)
            whole_backward(up)
        while made.num_forwards(up) < planned:
            if made.num_forwards(down) < planned:
                made.forward(down)
            whole_backward(down)
            made.forward(up)
            whole_backward(up)
        for _ in range(rank):
            made.backward(down, split=True)
            made.backward(up, split=True)
        for _ in range(num_ranks - rank):
            whole_backward(down)
        for stage in (up, down):
            for _ in range(rank):
                made.weights(stage)
        return tuple(action for action in made.actions() if action.micro < num_micro)

    def idle(times: Times) -> float | None:
        forward, input_grads, weight_grads, _ = times
        if not weight_grads <= forward <= input_grads:
            return None
        filled = (min(num_micro, num_ranks) - 1) * forward
        filled += min(max(num_micro - num_ranks, 0), num_ranks - 1) * weight_grads
        return (num_ranks - 1) * (forward + input_grads) - filled

    return Schedule(
        "zb-v",
        num_ranks,
        num_micro,
        2,
        program,
        partial(_rank_of, num_ranks),
        idle,
        lambda rank: min(2 * num_micro, 2 * num_ranks, num_micro + rank + 1),
    )


def dual_pipe_v(num_ranks: int, num_micro: int) -> Schedule:
    """In most of the step a forward of one stage beside a backward of the other (the V-shaped half of DualPipe, 2412.19437).

    On ranks that overlap the messages of experts with computation, the two actions of such a pair run at the same time. Here they run
    one after the other. ValueError for fewer than 2P micro-batches.
    """
    if num_micro < 2 * num_ranks:
        raise ValueError(
            f"dualpipe-v: expected at least 2 x {num_ranks} ranks = {2 * num_ranks} micro-batches, got {num_micro}"
        )

    def program(rank: int) -> tuple[Action, ...]:
        made, down, up = Program(), rank, 2 * num_ranks - 1 - rank
        later = num_ranks - rank - 1  # ranks below this one on the V
        for _ in range(2 * later):
            made.forward(down)
        for _ in range(rank + 1):
            made.forward(down)
            made.forward(up)
        for _ in range(later):
            made.backward(up, split=True)
            made.weights()
            made.forward(up)
        for _ in range(num_micro - 2 * num_ranks + rank + 1):
            made.forward(down)
            made.backward(up)
            made.forward(up)
            made.backward(down)
        for _ in range(later):
            made.backward(up)
            made.forward(up)
            made.backward(down)
        # The second half of what is left splits its backwards, and the gradients of weights fill the end.
        for number in range(2 * (rank + 1)):
            made.backward(down if number % 2 else up, split=number > rank)
        for _ in range(later):
            made.weights()
            made.backward(down, split=True)
        for _ in range(rank + 1):
            made.weights()
        return made.actions()

    def idle(times: Times) -> float | None:
        forward, input_grads, weight_grads, _ = times
        if weight_grads > input_grads or forward > times.backward:
            return None
        # A backward that takes longer than a forward makes the ranks wait for each other in the pairs, too.
        slower = max((num_ranks - 1) * (input_grads - forward) - forward, 0)
        return ((num_ranks - 1) * (forward + input_grads - weight_grads) + slower) / 2

    return Schedule(
        "dualpipe-v",
        num_ranks,
        num_micro,
        2,
        program,
        partial(_rank_of, num_ranks),
        idle,
        lambda rank: min(2 * num_ranks + 1, 2 * num_micro),
    )


def _rank_of(num_ranks: int, stage: int) -> int:
    return min(stage, 2 * num_ranks - 1 - stage)
