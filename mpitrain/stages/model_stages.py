"""The stages of a model that a rank has. Modules of other ranks' stages are removed, and the others keep their names."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mpitrain.stage_streams import SplitStream, mark_stages, split_of
from mpitrain.stages.plan import StagePlan


class _PassOn(nn.Module):
    """In the place of a module that the stage does not have: returns its first argument."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x


class ModelStages:
    """The `mine` of a model's stages. The model's own forward computes each, with the modules of that stage alone in their places.

    `division`: the blocks of each stage. A module that shares a parameter with a module of this rank's stages stays, so that the
    parameter keeps its name.
    """

    def __init__(self, model: nn.Module, plan: StagePlan, division: Sequence[range], mine: Sequence[int]) -> None:
        self.model, self.num_stages = model, len(division)
        self._plan, self._division = plan, division
        self._blocks = model.get_submodule(plan.blocks)
        self._keys = list(self._blocks._modules)
        self._pass_on = _PassOn()
        self._stage = mine[0]
        self._whole_forward = model.forward
        model.forward = self._forward
        self._split = {stage: split for stage in mine if (split := self._split_stream(division[stage])) is not None}
        mark_stages(model, plan.stream)
        names_of = self.names_of(model, plan, division)
        owned = {
            id(param) for stage in mine for name in names_of[stage] for param in model.get_submodule(name).parameters()
        }
        for stage in set(range(self.num_stages)) - set(mine):
            for name in names_of[stage]:
                if not any(id(param) in owned for param in model.get_submodule(name).parameters()):
                    parent, _, key = name.rpartition(".")
                    del model.get_submodule(parent)._modules[key]

    def _split_stream(self, blocks: range) -> SplitStream | None:
        """Let the stream pass between these blocks and those of other stages. How the stream that comes is split; None if it is not."""
        comes_split = None
        for at in {blocks[0], blocks[-1]} if blocks else ():
            block = self._blocks.get_submodule(self._keys[at])
            if (split := split_of(block)) is None:
                continue
            if at == blocks[0] > 0:
                block.register_forward_pre_hook(split.arrive, with_kwargs=True, prepend=True)
                comes_split = split
            if at == blocks[-1] < len(self._keys) - 1:
                block.register_forward_hook(split.pass_on)
        return comes_split

    @staticmethod
    def names_of(model: nn.Module, plan: StagePlan, division: Sequence[range]) -> list[list[str]]:
        """The modules of each stage."""
        keys = list(model.get_submodule(plan.blocks)._modules)
        names = [[f"{plan.blocks}.{keys[at]}" for at in blocks] for blocks in division]
        names[0], names[-1] = [*plan.first, *names[0]], [*names[-1], *plan.last]
        return names

    def __call__(self, stage: int, x: torch.Tensor | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The output of one stage. `x`: that of the stage before; None in the first stage, which gets the inputs of the model."""
        self._stage = stage
        if x is None:
            return self.model(*args, **kwargs, **self._plan.options)
        if stage in self._split and torch.is_grad_enabled():
            x = self._split[stage].at_place(x)
        return self.model(**kwargs, **self._plan.options, **{self._plan.stream: x})

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the model: of one stage. Hooks before it, such as those of `fully_shard`, see all modules of this rank."""
        with self._alone(self._stage):
            return self._whole_forward(*args, **kwargs)

    @contextmanager
    def _alone(self, stage: int) -> Iterator[None]:
        """In the block, the model has the modules of one stage."""
        changed: list[tuple[dict[str, Any], dict[str, Any]]] = []
        blocks = self._blocks._modules
        changed.append((blocks, dict(blocks)))
        for key in set(blocks) - {self._keys[at] for at in self._division[stage]}:
            del blocks[key]
        for name in () if stage == self.num_stages - 1 else self._plan.last:
            parent, _, key = name.rpartition(".")
            modules = self.model.get_submodule(parent)._modules
            changed.append((modules, dict(modules)))
            modules[key] = self._pass_on
        try:
            yield
        finally:
            for modules, before in reversed(changed):
                modules.clear()
                modules.update(before)


def stream_of(output: Any) -> torch.Tensor:
    """The stream of activations in the output of a stage: the output, or the first tensor in it."""
    if isinstance(output, torch.Tensor):
        return output
    return next(
        value
        for value in (output.values() if isinstance(output, Mapping) else output)
        if isinstance(value, torch.Tensor)
    )
