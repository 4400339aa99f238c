"""The pure parts of `profile`: places and parts of a step, sentences, tables and advice."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from rich.console import Console

from mpitrain.job.config import check_ranks, parse
from mpitrain.stages.records import Measured
from mpitrain.stages.schedules import StageTimes, make_schedule
from mpitrain.stages.schedules.timeline import timeline
from mpitrain.tools.plan.layout import MPITRAIN
from mpitrain.tools.plan.price import price
from mpitrain.tools.plan.transformer import of_sizes
from mpitrain.tools.profile.advice import LEAST_GAIN, advised
from mpitrain.tools.profile.clock import Communicated, PlaceClock
from mpitrain.tools.profile.fitting import Figures, fitted, layout_of
from mpitrain.tools.profile.memory_kinds import HeldMemory
from mpitrain.tools.profile.parts import Parts, parts_of
from mpitrain.tools.profile.places import GRADIENTS, OTHER, PASSES, STAGES, Place, PlaceTimes
from mpitrain.tools.profile.sentences import sentences
from mpitrain.tools.profile.stage_waits import StageWaits
from mpitrain.tools.profile.table import tables


class At(NamedTuple):
    """A moment of a clock that tests set."""

    at: float

    def since(self, earlier: "At") -> float:
        return self.at - earlier.at


def test_a_clock_divides_a_step_and_gives_what_is_between_layers_to_the_next() -> None:
    now, communicated = 0.0, Communicated(0.0, 0.0)
    clock = PlaceClock(lambda: At(now), lambda: communicated)

    def after(seconds: float, of_layers: float = 0.0, of_stages: float = 0.0) -> None:
        nonlocal now, communicated
        now += seconds
        communicated = Communicated(communicated.of_layers + of_layers, communicated.of_stages + of_stages)

    clock.begin()
    after(1)
    clock.enter("data")
    after(2)
    clock.leave("data")
    clock.enter(*PASSES)
    for _ in range(2):
        after(3, of_layers=1)  # gathers parameters
        clock.enter("blocks.0", "forward")
        after(4)
        clock.leave("blocks.0", "forward")
        after(5, of_stages=5)
        clock.enter("blocks.0", "backward")
        after(6, of_layers=2)
        clock.leave("blocks.0", "backward")
        after(7, of_layers=7)  # after a backward, before the next forward, or the end
        if _ == 0:
            clock.enter("blocks.0", "forward")
            clock.leave("blocks.0", "forward")
    clock.leave(*PASSES)
    after(1)
    times = clock.end()
    block: dict[str, Place] = {kind: ("blocks.0", kind) for kind in ("forward", "backward")}
    assert times.computed[block["forward"]] == 2 * (3 - 1 + 4) and times.computed[block["backward"]] == 2 * (6 - 2)
    assert times.communicated[block["forward"]] == 2 and times.communicated[block["backward"]] == 4
    assert times.communicated[STAGES] == 10 and times.communicated[GRADIENTS] == 14 and times.computed[GRADIENTS] == 0
    assert times.computed["data", ""] == 2 and times.computed[OTHER] == 2
    assert times.total == now


def times(**seconds: float) -> PlaceTimes:
    """Of one block: forward, backward, communicated, other."""
    computed: defaultdict[Place, float] = defaultdict(float)
    communicated: defaultdict[Place, float] = defaultdict(float)
    for kind in ("forward", "backward"):
        computed["blocks.0", kind] = seconds.get(kind, 0.0)
    computed[OTHER] = seconds.get("other", 0.0)
    communicated["blocks.0", "backward"] = seconds.get("communicated", 0.0)
    return PlaceTimes(computed, communicated)


def steps_of_a_late_rank() -> list[list[PlaceTimes]]:
    """Rank 1 computes 60 ms longer, and rank 0 waits for it; one step was disturbed."""
    quick = times(forward=0.04, backward=0.08, communicated=0.07, other=0.01)
    late = times(forward=0.06, backward=0.12, communicated=0.01, other=0.01)
    return [[quick, quick, times(forward=9.0), quick, quick], [late, late, times(forward=9.0), late, late]]


def test_parts_add_up_and_the_rank_that_comes_last_does_not_wait() -> None:
    parts = parts_of(steps_of_a_late_rank(), [0, 0])
    assert parts.num_steps == 3  # without the disturbed one
    assert parts.of("blocks.0", "wait") == pytest.approx([0.06, 0.0])
    assert parts.of("blocks", "transfer") == pytest.approx([0.01, 0.01])
    assert parts.of_ranks == pytest.approx([0.2, 0.2]) and parts.step_s == pytest.approx(0.2)
    assert sum(sum(parts.of_layer(layer)) for layer in ("blocks", "other")) == pytest.approx(0.4)


def test_sentences_name_the_late_rank_its_cause_and_where_the_others_wait() -> None:
    parts = parts_of(steps_of_a_late_rank(), [0, 0], [[(0.12, 0.0)] * 5, [(0.12, 0.06)] * 5])
    slow, waits = sentences(parts)
    assert slow.startswith(
        "Rank 1 takes 1.46 times as long as the other ranks: its core is shared with another process"
    )
    assert waits == (
        "Rank 0 waits 60.0 ms a step (30%) for rank 1, whose time in blocks is 60.0 ms more, 1.5 times as long; 100% of the wait is in "
        "blocks.0."
    )
    even = Parts({"blocks.0": {"forward": [0.1, 0.1], "wait": [0.002, 0.0]}}, [0, 0], 1)
    assert sentences(even) == ["No rank waits 3% of a step or more for another one, or for data."]
    turns = Parts(
        {"blocks.0": {"forward": [0.1, 0.1], "wait": [0.02, 0.02]}, "data": {"own work": [0.03, 0.01]}}, [0, 0], 1
    )
    in_turn, data = sentences(turns)
    assert in_turn.startswith("Ranks 0, 1 wait 20.0 ms a step (14%) in turn")
    assert data == "The ranks wait 10.0 to 30.0 ms a step (14%) for data, most on rank 0."


def test_a_pipeline_waits_for_stages() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    planned = timeline(schedule, schedule_times())
    waits = StageWaits.of(Measured(schedule, [planned], [planned.total], 0.0))
    # The second stage begins when the first micro-batch has come. The first waits for both gradients.
    assert waits.ranks[1] == pytest.approx({(0, "activations"): 0.01})
    assert waits.ranks[0] == pytest.approx({(1, "gradients"): 0.03})
    parts = Parts({"other stages": {"wait": [0.03, 0.01]}, "blocks.0": {"forward": [0.06, 0.08]}}, [0, 1], 1)
    lines = sentences(parts, [waits])
    assert lines[0] == "Stage 0 (rank 0) waits 30.0 ms a step (33%) for gradients of stage 1."
    assert lines[1] == "Stage 1 (rank 1) waits 10.0 ms a step (11%) for activations of stage 0."
    assert "nothing to do" in lines[2] and "1f1b with 2 micro-batches" in lines[2]


def schedule_times() -> StageTimes:
    return StageTimes(({"F": 0.01, "B": 0.02}, {"F": 0.01, "B": 0.02}), 0.0)


def shown(parts: Parts, held: Sequence[HeldMemory], *, every_block: bool) -> str:
    console = Console(width=160)
    with console.capture() as text:
        console.print(*tables(parts, held, every_block=every_block), sep="\n")
    return text.get()


def test_tables_have_all_blocks_or_the_slowest_and_many_ranks_in_few_columns() -> None:
    blocks = {f"blocks.{n}": {"forward": [0.01 * (1 + (n == 10))] * 9} for n in range(12)}
    parts = Parts({**blocks, "optimizer": {"own work": [0.01 * rank for rank in range(9)]}}, [0] * 9, 5)
    layer = {"parameters": 1_000_000, "gradients": 2_000_000, "optimizer": 0, "activations": 0}
    held = [
        HeldMemory(dict.fromkeys(blocks, layer), {"other": 5_000_000}, 41_000_000, "in the forward of blocks.3")
    ] * 9
    text = shown(parts, held, every_block=False)
    assert "12 blocks" in text and "blocks.10 (slowest)" in text and "blocks.9" not in text
    assert "least ms" in text and "80.0" in text and "rank 8" in text  # the longest optimizer
    assert "its peak of 41 MB, in the forward of blocks.3" in text and "36.0" in text
    every = shown(parts, held, every_block=True)
    assert all(f"  blocks.{n}" in every for n in range(12))


FIGURES = Figures(
    step_s=8.0, compute_s=5.0, optimizer_s=0.1, transfer_s=2.0, data_s=0.0, others_s=0.1, flops_per_s=5e11, num_nodes=1, memory=32e9,
    is_cpu=True,
)  # fmt: skip


def test_the_fitted_machine_computes_and_sends_as_fast_as_the_profile() -> None:
    config = parse(["--model.size", "small", "--train.batch", "8", "--parallel.storage", "private"])
    model = of_sizes("", config.model.resolve(), None)
    machine = fitted(config, model, 4, FIGURES)
    seconds = price(model, machine, MPITRAIN, layout_of(config, 4, machine)).seconds
    assert seconds["compute"] == pytest.approx(5.0, rel=0.01)
    assert seconds["optimizer"] == pytest.approx(0.1, rel=0.01)
    assert seconds["gradients"] + seconds["gathers"] == pytest.approx(2.0, rel=0.05)


def test_advice_is_possible_keeps_the_batch_and_comes_by_gain() -> None:
    words = "--model.size small --train.batch 8 --parallel.storage private --parallel.checkpoint-activations block"
    config = parse(words.split())
    found = advised(config, 4, FIGURES)
    gains = [each.gain for each in found.advice]
    assert gains == sorted(gains, reverse=True) and min(gains) >= LEAST_GAIN
    for each in found.advice:
        changed = parse(each.flags.split(), config)
        check_ranks(changed, 4)
        assert changed != config and changed.train.batch == 8
    changes = {name for each in found.advice for name in each.settings if len(each.settings) == 1}
    assert {"parallel.storage", "parallel.checkpoint_activations"} <= changes
    kept = advised(parse(["--parallel.no-reshard-after-forward"], config), 4, FIGURES)
    assert kept.predicted_s < 0.95 * found.predicted_s
    text = "\n".join(found.lines())
    assert "error of" in text and "8,000.0 ms" in text
    assert text.splitlines()[-1].endswith("--train.batch 16 (other mathematics: the batch is larger)")
    assert found.larger_batch is not None and LEAST_GAIN <= found.larger_batch.gain < 1
    check_ranks(parse(found.larger_batch.flags.split(), config), 4)


def test_advice_needs_the_memory_and_the_model_is_told_to_expect_nothing() -> None:
    words = "--model.size small --train.batch 8 --parallel.storage private --parallel.checkpoint-activations block"
    config = parse(words.split())
    alone = {"parallel.checkpoint_activations": "none"}
    assert alone in [each.settings for each in advised(config, 4, FIGURES).advice]
    small = FIGURES._replace(memory=2.5e9)  # 1.9 GB a rank with recomputation, 3.0 GB without
    scarce = advised(config, 4, small)
    assert alone not in [each.settings for each in scarce.advice] and scarce.larger_batch is None
    best = config
    for _ in range(4):  # to follow the advice leads to a layout without advice
        found = advised(best, 4, FIGURES._replace(transfer_s=0.01))
        if not found.advice:
            break
        best = parse(found.advice[0].flags.split(), best)
    assert not found.advice and "No other layout" in "\n".join(found.lines())
    slow_data = advised(best, 4, FIGURES._replace(data_s=2.0, transfer_s=0.01))
    assert [each.flags for each in slow_data.advice] == ["--data.processes 2"] and slow_data.advice[0].gain == 0.25
