"""Prices on a machine with measured kernels and links."""

from dataclasses import fields, replace

import pytest

from mpitrain.job.record.machine.constants import KernelConstants, Links, Overheads
from mpitrain.job.record.machine.machine import from_text, load
from mpitrain.tools.plan import price as prices
from mpitrain.tools.plan.kernels import BlockPart, kernels_of
from mpitrain.tools.plan.layout import MPITRAIN, RankLayout
from mpitrain.tools.plan.links import gather, group, message, reduce, scatter
from mpitrain.tools.plan.measuring.constants import MeasuredConstant, to_toml
from mpitrain.tools.plan.measuring.overheads import BASE, DEEP, MANY, fitted, layouts
from mpitrain.tools.plan.price import price, stage_times
from mpitrain.tools.plan.transformer import find

KERNELS = KernelConstants(
    product_flops=(4e10, 5e10),
    cut_product_flops=(8e10, 5e10),
    weight_s=(1e-9, 2e-9),
    attention_flops=((128, 1e10, 2e10), (256, 2e10, 3e10)),
    norm_s=(1e-9, 2e-9),
    gelu_s=(3e-9, 4e-9),
    residual_s=5e-10,
    loss_s=(1e-9, 2e-9),
    operation_s=(3e-6, 4e-6),
    update_s=2e-9,
    grad_norm_s=4e-10,
    add_s=6e-10,
)
LINKS = Links(
    node_all_reduce=((1e3, 1e-5), (1e6, 1e-3)),
    node_all_gather=((1e3, 2e-5), (1e6, 2e-3)),
    node_gather_tokens=((1e3, 3e-6), (1e6, 3e-4)),
    node_scatter_tokens=((1e3, 7e-6), (1e6, 7e-4)),
    node_sum_tokens=((1e3, 8e-6), (1e6, 8e-4)),
    node_reduce_scatter=((1e3, 4e-5), (1e6, 4e-3)),
    node_message=((1e3, 5e-6), (1e6, 5e-4)),
)
PLAIN = replace(
    load("h100"), element_bytes=4, shares_memory=True, ranks_per_node=2, flops=1e11, memory=12e9, memory_bandwidth=1e10
)
MACHINE = replace(PLAIN, kernels=KERNELS, links=LINKS)
MODEL = replace(find("gpt-tiny"), layers=4)
DATA = RankLayout(data=2, micro=4, batch=8)


def step(layout: RankLayout) -> float:
    return price(MODEL, MACHINE, MPITRAIN, layout).step_s


def test_kernels_are_those_of_the_file() -> None:
    whole, cut = (kernels_of(MACHINE, is_cut=is_cut) for is_cut in (False, True))
    assert whole.product(128, 256, 512) == KERNELS.product_s(128, 256, 512)
    assert cut.product(128, 256, 512) == KERNELS.product_s(128, 256, 512, is_cut=True)
    part = BlockPart(128, 1, 4, 4 * MODEL.width)
    assert whole.attention(MODEL, MPITRAIN, part) == KERNELS.attention_s(128, MODEL.context, 4 * MODEL.head_width)
    elements = 128 * MODEL.width
    assert whole.elementwise(MODEL, MPITRAIN, part)[0] == pytest.approx(
        elements * (2 * 1e-9 + 2 * 5e-10 + 4 * 3e-9) + 8 * 3e-6
    )
    # Two ranks that share the tokens between matrices have half of the norms and sums each.
    less = whole.elementwise(MODEL, MPITRAIN, part)[1] - whole.elementwise(MODEL, MPITRAIN, part._replace(sharers=2))[1]
    assert less == pytest.approx(elements / 2 * (2 * 2e-9 + 2 * 5e-10))
    assert whole.optimizer(1000) == pytest.approx(1000 * (2e-9 + 4e-10 + 8 / 1e10))
    assert whole.gradients(1000, 500, moves=2, adds=3) == pytest.approx(2 * 1000 * 8 / 1e10 + 3 * 500 * 6e-10)


def test_collectives_are_those_of_the_file() -> None:
    two = group(MACHINE, 2, 1)
    assert gather(MACHINE, 1e6, two).seconds == pytest.approx(2e-3)
    assert gather(MACHINE, 1e6, two, of_tokens=True).seconds == pytest.approx(3e-4)
    assert scatter(MACHINE, 1e6, two, of_tokens=True).seconds == pytest.approx(7e-4)
    assert reduce(MACHINE, 1e6, two, of_tokens=True).seconds == pytest.approx(8e-4)
    # Fewer ranks than were measured send a smaller share in a collective, and write and read as much in an exchange of tokens.
    four = replace(MACHINE, ranks_per_node=4)
    assert reduce(four, 1e6, two, of_tokens=True).seconds == pytest.approx(8e-4)
    assert reduce(four, 1e6, two).seconds == pytest.approx(1e-3 * (1 / 2) / (3 / 4))
    # Between nodes there are messages alone.
    over = group(MACHINE, 4, 1)
    assert scatter(MACHINE, 1e6, over, of_tokens=True) == scatter(MACHINE, 1e6, over)
    assert scatter(MACHINE, 1e6, two).seconds == pytest.approx(4e-3)
    assert reduce(MACHINE, 1e6, two).seconds == pytest.approx(1e-3)
    assert message(MACHINE, 1e6, within_node=True).seconds == pytest.approx(5e-4)
    assert gather(MACHINE, 1e6, two, is_shared=True).seconds == 0
    # Many small ones take longer, and send as much.
    assert reduce(MACHINE, 1e3, two, parts=10).seconds == pytest.approx(10 * 1e-5)
    assert reduce(MACHINE, 1e3, two, parts=10)[1:] == reduce(PLAIN, 1e3, two)[1:]
    # Between nodes nothing was measured.
    assert reduce(MACHINE, 1e6, group(MACHINE, 4, 1)) == reduce(PLAIN, 1e6, group(PLAIN, 4, 1))


def test_collectives_between_nodes() -> None:
    links = replace(LINKS, num_nodes=2, all_reduce=((1e3, 1e-4), (1e6, 1e-2)))
    machine = replace(MACHINE, links=links)
    within, between = 1e-3, links.seconds("all_reduce", 5e5)
    assert between is not None
    assert reduce(machine, 1e6, group(machine, 4, 1)).seconds == pytest.approx(within + between)
    # Of four nodes each sends 3/4 in place of 1/2 of the bytes.
    assert reduce(machine, 1e6, group(machine, 8, 1)).seconds == pytest.approx(within + 1.5 * between)


def test_storage_and_micro_batches() -> None:
    private, resident = DATA._replace(zero=2), DATA._replace(zero=2, resident=True)
    assert step(resident) < step(private)
    gathers = price(MODEL, MACHINE, MPITRAIN, private).sent["gathers"].seconds
    assert price(MODEL, MACHINE, MPITRAIN, resident).sent["gathers"].seconds == 0
    # Each micro-batch begins with a gather, and stage 3 also gathers for each backward.
    four = private._replace(micro=1)
    assert price(MODEL, MACHINE, MPITRAIN, four).sent["gathers"].seconds == pytest.approx(4 * gathers)
    assert price(MODEL, MACHINE, MPITRAIN, four._replace(zero=3)).sent["gathers"].seconds == pytest.approx(8 * gathers)
    assert step(four) > step(private)


def test_recomputation_stops_before_the_last_product_unless_it_is_cut() -> None:
    kernels, tokens = kernels_of(MACHINE, is_cut=False), 4 * MODEL.context
    whole = price(MODEL, MACHINE, MPITRAIN, DATA._replace(recompute="block")).seconds["again"] / MODEL.layers
    all_ = price(MODEL, MACHINE, replace(MPITRAIN, recomputes_last=True), DATA._replace(recompute="block"))
    left_out = all_.seconds["again"] / MODEL.layers - whole
    assert left_out == pytest.approx(kernels.product(tokens, MODEL.inner, MODEL.width)[0])
    cut = RankLayout(tensor=2, micro=8, batch=8, recompute="block")
    assert price(MODEL, MACHINE, MPITRAIN, cut) == price(MODEL, MACHINE, replace(MPITRAIN, recomputes_last=True), cut)


def test_stages_have_the_blocks_of_the_trainer() -> None:
    layout = RankLayout(pipeline=2, micro=1, batch=8)
    first, last = stage_times(MODEL, MACHINE, MPITRAIN, layout)
    assert last.forward > first.forward  # the head
    whole = stage_times(MODEL, MACHINE, MPITRAIN, RankLayout(micro=1, batch=8))
    assert len(whole) == 1 and whole[0].message == 0 < first.message


def test_the_waits_of_a_pipeline_follow_from_its_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = RankLayout(pipeline=2, micro=1, batch=8)
    exact = price(MODEL, MACHINE, MPITRAIN, layout)
    assert exact.seconds["bubble"] > 0 and exact.seconds["messages"] > 0
    # The formula, for large pipelines, has stages that are alike.
    monkeypatch.setattr(prices, "_MOST_ACTIONS", 0)
    assert price(MODEL, MACHINE, MPITRAIN, layout).step_s == pytest.approx(exact.step_s, rel=0.1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_products_of_weights_may_take_longest(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No schedule's formula need hold for measured times."""
    monkeypatch.setattr(prices, "_MOST_ACTIONS", 0)
    machine = replace(MACHINE, kernels=replace(KERNELS, cut_product_flops=(4e11, 1e10)))
    chunks = 1 if schedule in ("gpipe", "1f1b", "zb-h1") else 2
    layout = RankLayout(pipeline=2, schedule=schedule, stages_per_rank=chunks, micro=1, batch=8)
    assert price(MODEL, machine, MPITRAIN, layout).seconds["bubble"] >= 0


def test_the_file_of_measure_is_a_machine() -> None:
    def constants(of: object) -> dict[str, MeasuredConstant]:
        return {name: MeasuredConstant(value, "From a test.") for name, value in vars(of).items() if value is not None}

    plain = constants(PLAIN)
    del plain["efficiency"]
    text = to_toml(
        {
            "": plain,
            "efficiency": constants(PLAIN.efficiency),
            "kernels": constants(KERNELS),
            "links": constants(LINKS),
            "overheads": constants(OVERHEADS),
        },
        "Of a test.",
    )
    read = from_text(text, "x")
    assert (read.kernels, read.links, read.overheads) == (KERNELS, LINKS, OVERHEADS)
    with pytest.raises(ValueError, match=r"unknown key kernels.gelu in machine file x: did you mean kernels.gelu_s"):
        from_text(text.replace("gelu_s", "gelu"), "x")
    with pytest.raises(ValueError, match=r"kernels.norm_s is missing"):
        from_text("\n".join(line for line in text.splitlines() if "norm_s =" not in line or "grad" in line), "x")


OVERHEADS = Overheads(
    data=(0.1, 0.01, 0.001),
    gathered=(0.1, 0.02, 0.002),
    block_again_s=0.0005,
    tensor=(0.2, 0.03, 0.003),
    sequence=(0.2, 0.04, 0.005),
    stages=(0.3, 0.05, 0.006),
)


def test_overheads_are_those_of_the_file() -> None:
    """Four blocks."""
    machine = replace(MACHINE, overheads=OVERHEADS)

    def overhead(layout: RankLayout) -> float:
        seconds = price(MODEL, machine, MPITRAIN, layout).seconds["overhead"]
        assert price(MODEL, MACHINE, MPITRAIN, layout).seconds["overhead"] == 0
        return seconds

    assert overhead(DATA) == pytest.approx(0.1 + 0.01 + 4 * 0.001)
    assert overhead(DATA._replace(micro=1)) == pytest.approx(0.1 + 4 * (0.01 + 4 * 0.001))
    assert overhead(DATA._replace(recompute="block")) == pytest.approx(0.1 + 0.01 + 4 * 0.0015)
    gathered = DATA._replace(zero=3)
    assert overhead(gathered) == pytest.approx(0.1 + 0.02 + 4 * 0.002)
    assert overhead(gathered._replace(resident=True)) == overhead(DATA)
    both = RankLayout(tensor=2, data=2, zero=3, micro=4, batch=8)
    assert overhead(both) == pytest.approx(0.2 + 0.04 + 0.01 + 4 * (0.005 + 0.001))
    tensor = RankLayout(tensor=2, micro=8, batch=8)
    assert overhead(tensor) == pytest.approx(0.2 + 0.04 + 4 * 0.005)
    assert overhead(tensor._replace(sequence=False)) == pytest.approx(0.2 + 0.03 + 4 * 0.003)
    # A block that is computed again has the exchanges of a forward, too.
    assert overhead(tensor._replace(recompute="block")) == pytest.approx(0.2 + 0.04 + 4 * (0.005 + 0.0005 + 0.002))


def test_overheads_of_a_pipeline_are_those_of_its_stages() -> None:
    """Ranks wait for the overhead of the others, as for their computation. Two stages of two blocks, and eight micro-batches."""
    machine = replace(MACHINE, overheads=OVERHEADS)
    layout = RankLayout(pipeline=2, micro=1, batch=8)
    plain, more = (price(MODEL, of, MPITRAIN, layout) for of in (MACHINE, machine))
    of_stage = 0.05 + 2 * 0.006
    assert more.seconds["overhead"] == pytest.approx(0.3 + 8 * of_stage)
    assert more.step_s - plain.step_s == pytest.approx(0.3 + 9 * of_stage, rel=0.01)
    again = price(MODEL, machine, MPITRAIN, layout._replace(recompute="block")).seconds["overhead"]
    assert again == pytest.approx(0.3 + 8 * (of_stage + 2 * 0.0005))
    # The formula of large pipelines has as many stages.
    two = RankLayout(pipeline=2, schedule="interleaved", stages_per_rank=2, micro=1, batch=8)
    exact = price(MODEL, machine, MPITRAIN, two).step_s
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prices, "_MOST_ACTIONS", 0)
        assert price(MODEL, machine, MPITRAIN, two).step_s == pytest.approx(exact, rel=0.03)
    # Noise in the file makes no negative times.
    noisy = replace(machine, overheads=replace(OVERHEADS, data=(0.1, 0.01, 0.1)))
    cut = price(MODEL, noisy, MPITRAIN, layout._replace(tensor=2)).seconds["overhead"]
    assert cut == pytest.approx(0.3 + 8 * of_stage)
    # Tensor parallelism within the stages adds its blocks' exchanges.
    cut = price(MODEL, machine, MPITRAIN, layout._replace(tensor=2)).seconds["overhead"]
    assert cut == pytest.approx(0.3 + 8 * (of_stage + 2 * (0.005 - 0.001)))


def test_overheads_are_found_again() -> None:
    """From the times that they cause."""
    for stages in (1, 2, 4):
        step, micro, block = 0.3, 0.02, 0.004
        more = {
            run: step + (run.num_micro + stages - 1) * (micro + run.blocks / stages * block)
            for run in (BASE, DEEP, MANY)
        }
        assert fitted(more, stages) == pytest.approx((step, micro, block))
    # Noise never makes a negative time, nor more than the steps took.
    for noisy in ({BASE: 0.1, DEEP: 0.09, MANY: 0.05}, {BASE: 0.1, DEEP: 0.9, MANY: 0.11}):
        step, micro, block = fitted(noisy, 1)
        assert min(step, micro, block) == 0
        assert step + BASE.num_micro * micro <= noisy[BASE]


@pytest.mark.parametrize(("ranks", "per_node", "tensor"), [(1, 1, 0), (2, 2, 2), (3, 3, 0), (48, 12, 4), (64, 32, 8)])
def test_layouts_of_overheads_fit_the_ranks(ranks: int, per_node: int, tensor: int) -> None:
    found = layouts(ranks, per_node)
    assert all(layout.ranks == ranks for layout in found.values())
    assert found["sequence"].tensor == tensor if tensor else "tensor" not in found
    assert ("stages" in found) == (ranks % 2 == 0)
    names = {field.name for field in fields(Overheads)} - {"block_again_s"}
    assert names >= {*found} - {"again"}
