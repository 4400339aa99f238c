"""The stages of a model that a rank has. Modules of other ranks' stages are removed, and the others keep their names."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mpitrain.placement.parts import mark_stack, mark_stage
from mpitrain.placement.stage_streams import SplitStream, mark_stages, split_of
from mpitrain.plans.draws import mark_places_after
from mpitrain.plans.stage_plan import StagePlan
from mpitrain.stages.passage import Enter, Leave, Nothing, Passage, PassOn


class ModelStages:
    """The `mine` of a model's stages. The model's own forward computes each, with the modules of that stage alone in their places.

    A stream enters in the place of the blocks before the stage, and is taken in the place of the modules after it. So what the model
    computes before the first block is of the first stage alone, and what it computes after the blocks of the last one, also without
    a module: a factor of the embedding, or a limit of the logits. `division`: the blocks of each stage. A module that shares a
    parameter with a module of this rank's stages stays, so that the parameter keeps its name.
    """

    def __init__(self, model: nn.Module, plan: StagePlan, division: Sequence[range], mine: Sequence[int]) -> None:
        self.model, self.num_stages = model, len(division)
        self._plan, self._division = plan, division
        self._blocks = model.get_submodule(plan.blocks)
        self._keys = list(self._blocks._modules)
        self._stage = mine[0]
        self._passages = {stage: self._passage_of(stage) for stage in mine}
        self._stand_ins = {stage: self._stand_ins_of(stage) for stage in mine}
        self._whole_forward = model.forward
        model.forward = self._forward
        mark_stages(model, plan.stream)
        mark_stack(self._blocks)
        names_of = self.names_of(model, plan, division)
        for module in model.modules():
            mark_stage(module, min(mine))
        for stage in sorted(mine, reverse=True):
            for module in (each for name in names_of[stage] for each in model.get_submodule(name).modules()):
                mark_stage(module, stage)
        owned = {
            id(param) for stage in mine for name in names_of[stage] for param in model.get_submodule(name).parameters()
        }
        for stage in set(range(self.num_stages)) - set(mine):
            for name in names_of[stage]:
                if not any(id(param) in owned for param in model.get_submodule(name).parameters()):
                    parent, _, key = name.rpartition(".")
                    del model.get_submodule(parent)._modules[key]
        for block in self._blocks.children():
            block.register_forward_hook(_check_stream)
        mark_places_after((self._keys.index(key), block) for key, block in self._blocks.named_children())
        for stage in mine:
            self._watch(stage)
        self._is_called = False

    def _passage_of(self, stage: int) -> Passage:
        own = self._division[stage]
        return Passage(
            is_last=stage == self.num_stages - 1,
            comes=self._split(own.start),
            goes=self._split(own.stop),
        )

    def _split(self, at: int) -> SplitStream | None:
        """How the stream is split before the block of that number; None before the first one, after the last one, or if it is not."""
        return split_of(self._blocks.get_submodule(self._keys[at])) if 0 < at < len(self._keys) else None

    def _watch(self, stage: int) -> None:
        """Let the blocks of a stage tell its passage what they get and return."""
        passage = self._passages[stage]

        def comes(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            stream = passage.come(block, *args, *kwargs.values())
            return ((stream, *args[1:]), kwargs) if args else (args, kwargs | dict.fromkeys(list(kwargs)[:1], stream))

        def goes(block: nn.Module, args: Any, output: Any) -> None:
            passage.go(output)

        for at in self._division[stage]:
            block = self._blocks.get_submodule(self._keys[at])
            block.register_forward_pre_hook(comes, with_kwargs=True, prepend=True)
            block.register_forward_hook(goes)

    @staticmethod
    def names_of(model: nn.Module, plan: StagePlan, division: Sequence[range]) -> list[list[str]]:
        """The modules of each stage."""
        keys = list(model.get_submodule(plan.blocks)._modules)
        names = [[f"{plan.blocks}.{keys[at]}" for at in blocks] for blocks in division]
        names[0], names[-1] = [*plan.first, *names[0]], [*names[-1], *plan.last]
        return names

    def __call__(self, stage: int, x: torch.Tensor | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The output of one stage. `x`: that of the stage before; None in the first stage, which gets the inputs of the model."""
        self._stage, self._is_called = stage, True
        try:
            return self._call(stage, x, args, kwargs)
        finally:
            self._is_called = False

    def _call(self, stage: int, x: torch.Tensor | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if x is None:
            return self.model(*args, **kwargs, **self._plan.options)
        if (split := self._passages[stage].comes) is not None and torch.is_grad_enabled():
            x = split.at_place(x)
        named = {key: value for key, value in kwargs.items() if key != self._plan.input}
        return self.model(**named, **self._plan.options, **{self._plan.stream: x})

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the model: of one stage. Hooks before it, such as those of `fully_shard`, see all modules of this rank."""
        if not self._is_called:
            raise RuntimeError(
                f"this {type(self.model).__name__} is in stages, of which this rank has some; call step, evaluate or next_logits of "
                "its pipeline"
            )
        passage = self._passages[self._stage]
        # What the model computes from the stream before the blocks is not used.
        passage.begin(kwargs[self._plan.stream] if self._stage else None)
        try:
            with self._in_place(self._stand_ins[self._stage]):
                output = self._whole_forward(*args, **kwargs)
            return output if (stream := passage.end()) is None else stream
        finally:
            passage.close()

    def _stand_ins_of(self, stage: int) -> dict[str, nn.Module]:
        """What stands in the place of each module that the stage does not have, by name."""
        plan, own = self._plan, self._division[stage]
        names = [f"{plan.blocks}.{key}" for key in self._blocks._modules]
        found: dict[str, nn.Module] = {}
        if stage:
            for name in plan.first:
                module = self.model.get_submodule(name)
                found[name] = Nothing() if isinstance(module, nn.Embedding) else PassOn(module)
        passage = self._passages[stage]
        for at in range(own.start):
            found[names[at]] = Enter(self.model.get_submodule(names[at]), passage)
            mark_places_after([(at, found[names[at]])])
        if stage < self.num_stages - 1:
            for name in (*names[own.stop :], *plan.last):
                found[name] = Leave(self.model.get_submodule(name), passage, is_block=name in names)
        return found

    @contextmanager
    def _in_place(self, stand_ins: Mapping[str, nn.Module]) -> Iterator[None]:
        """In the block, each stand-in is in its place, and the blocks are in their order."""
        placed: dict[str, dict[str, nn.Module]] = {self._plan.blocks: {}}  # by the module around them
        for name, module in stand_ins.items():
            parent, _, key = name.rpartition(".")
            placed.setdefault(parent, {})[key] = module
        changed: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for parent, found in placed.items():
            modules = self.model.get_submodule(parent)._modules
            changed.append((modules, dict(modules)))
            modules.update(found)
        blocks = self._blocks._modules
        in_order = {key: blocks[key] for key in self._keys}
        blocks.clear()
        blocks.update(in_order)
        try:
            yield
        finally:
            for modules, before in reversed(changed):
                modules.clear()
                modules.update(before)


def _check_stream(block: nn.Module, args: Any, output: Any) -> None:
    if not isinstance(output, torch.Tensor):
        raise TypeError(
            f"pipeline: {type(block).__name__} returns {type(output).__name__}, and a stage passes on one tensor; let the block return "
            "the stream alone"
        )
