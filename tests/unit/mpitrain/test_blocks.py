"""Which blocks are taken where the user names none."""

import torch
from torch import nn

from mpitrain.sharding.setup.blocks import stacked_blocks


class Layer(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.encoder = nn.ModuleList(Layer(experts=3) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.decoder = nn.ModuleDict({"first": Layer(), "second": Layer(), "head": nn.Sequential(nn.Linear(4, 10))})


def test_the_blocks_of_all_outermost_stacks_in_order() -> None:
    model = Model()
    assert stacked_blocks(model) == [*model.encoder, model.decoder["first"], model.decoder["second"]]


def test_a_module_without_a_stack_has_none() -> None:
    assert stacked_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []
    assert stacked_blocks(nn.Sequential(Layer(), nn.Sequential(nn.Linear(2, 2)))) == [], "one of a kind is no stack"
    assert stacked_blocks(nn.ModuleList([nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())])) == [], "nothing to shard"


class Stage(nn.Module):
    """Holds parts, and has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.down = nn.Linear(4, 4)


def test_what_has_no_forward_is_no_block_and_what_it_holds_belongs_to_the_stack_around_it() -> None:
    linears = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(2))
    assert stacked_blocks(nn.Sequential(linears)) == []
    unet = nn.ModuleList(nn.ModuleList([Layer(), nn.Sequential(Layer()), nn.Conv1d(4, 4, 1)]) for _ in range(2))
    assert stacked_blocks(unet) == [unet[0][0], unet[0][1], unet[1][0], unet[1][1]]
    stages = nn.ModuleDict({"down": Stage(), "up": Stage()})
    assert stacked_blocks(stages) == [*stages["down"].layers, *stages["up"].layers]
    alone = nn.ModuleDict({"experts": nn.ModuleList([Layer(), Layer()]), "rest": nn.ModuleList([Layer()])})
    assert stacked_blocks(alone) == [], "one of a kind is no stack, and experts are none"


def test_blocks_whose_parameters_are_used_elsewhere_are_left_out() -> None:
    model = Model()
    model.encoder[0].mlp[2].weight = model.encoder[1].mlp[2].weight
    assert stacked_blocks(model) == [model.decoder["first"], model.decoder["second"]]
    within = Model()
    within.encoder[0].experts[0][0].weight = within.encoder[0].experts[1][0].weight
    assert stacked_blocks(within)[0] is within.encoder[0], "ties within a block are its own"
