"""Where regions are, and which modules get all tokens under sequence parallelism."""

import pytest
from torch import nn

from mpitrain.tensor.layout import TensorLayout
from mpitrain.tensor.plan import Style, styles_of

COLUMN, ROW = Style("column"), Style("row")


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter()
        self.router_of_tokens = Mlp()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.mixer, self.gate = nn.LayerNorm(4), Mlp(), Mlp(), nn.Linear(4, 4)
        self.attention = nn.ModuleDict({"q": Wrapped(), "o": Wrapped()})
        self.moe = nn.ModuleDict({"experts": Experts(), "shared": Mlp()})


class Model(nn.Module):
    def __init__(self, num_blocks: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(4, 4)


PLAN = {
    "blocks.*.mlp.up": COLUMN,
    "blocks.*.mlp.down": ROW,
    "blocks.*.attention.q.linear": COLUMN,
    "blocks.*.attention.o.linear": ROW,
    "blocks.*.moe.experts": Style("region"),
    "blocks.*.moe.experts.gate_up": Style("parameter", dim=1),
    "blocks.*.moe.shared.up": COLUMN,
    "blocks.*.moe.shared.down": ROW,
    "blocks.*.mixer.up": Style("column", gathers=True),
    "head": Style("column", gathers=True),
}


def layout(
    plan: dict[str, Style], *, sequence: bool = True, completes: bool = True, num_blocks: int = 1
) -> TensorLayout:
    model = Model(num_blocks)
    modules = dict(model.named_modules())
    styles = styles_of(modules, plan, dict(model.named_parameters()))
    return TensorLayout(modules, styles, sequence=sequence, completes=completes)


def test_a_region_contains_the_column_layers_before_its_row_layer() -> None:
    found = layout(PLAN)
    assert found.regions == {f"blocks.0.{name}" for name in ("mlp", "attention", "moe.experts", "moe.shared")}
    assert found.region("blocks.0.attention.o.linear") == "blocks.0.attention"
    assert found.region("blocks.0.mixer.up") is None
    assert found.heads == ["blocks.0.mixer.up", "head"]


def test_a_row_layer_that_cuts_its_input_may_be_alone() -> None:
    alone = Style("row", splits=True)
    assert layout({"blocks.*.gate": alone, "blocks.*.mlp.up": COLUMN}).regions == {"blocks.0.gate"}
    gathered = {"blocks.*.mlp.up": Style("column", gathers=True), "blocks.*.mlp.down": alone}
    assert layout(gathered).regions == {"blocks.0.mlp"}


def test_modules_that_may_mix_tokens_get_all() -> None:
    """A module with experts does, because it may put the tokens into another order. Norms and linear layers do not."""
    found = layout(PLAN)
    assert found.wholes == {"blocks.0.mixer", "blocks.0.moe"}
    assert found.is_cut("blocks.0.mlp") and found.is_cut("blocks.0.norm")
    assert not found.is_cut("blocks.0.moe.shared") and not found.is_cut("head")
    plain = layout(PLAN, sequence=False)
    assert not plain.wholes and not plain.stacks and not plain.is_cut("blocks.0.mlp")


def test_a_block_without_a_region_gets_all_tokens() -> None:
    plan = {"blocks.1.mlp.up": COLUMN, "blocks.1.mlp.down": ROW}
    assert "blocks.0" in layout(plan, num_blocks=2).wholes
    with pytest.raises(ValueError, match=r"the plan cuts nothing in blocks\.0, .*Style\('whole'\)"):
        layout(plan, num_blocks=2, completes=False)
    wholes = {f"blocks.1.{name}" for name in ("mixer", "attention", "moe")} | {"blocks.0"}
    found = layout({**plan, **dict.fromkeys(wholes, Style("whole"))}, num_blocks=2, completes=False)
    assert found.wholes == wholes


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r" is within blocks\.0\.moe, and both end with a sum"):
        layout({**PLAN, "blocks.*.moe": Style("region")})
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp is within blocks\.0\.mlp, where each rank has all tokens"):
        layout({**PLAN, "blocks.*.mlp": Style("whole")})
