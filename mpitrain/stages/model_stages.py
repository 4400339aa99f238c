"""The stages of a model that a rank has. Modules of other ranks' stages are removed, and the others keep their names."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mpitrain.models.draws import mark_places_after
from mpitrain.models.stage_plan import StagePlan
from mpitrain.parts import mark_stack, mark_stage
from mpitrain.stage_streams import SplitStream, mark_stages, split_of


class _PassOn(nn.Module):
    """In the place of a module that the stage does not have: returns its first argument.

    It has the module's numbers and texts, which the model's forward may read, such as the kind of attention of a block.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(
            (key, value) for key, value in vars(module).items() if isinstance(value, int | float | str)
        )

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x


class _Nothing(nn.Module):
    """In the place of an embedding: returns zero, which a forward may add to the stream."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(())


class _Border:
    """Where the stream enters a stage, or leaves it, in one forward. The model's forward may skip any of the blocks."""

    def __init__(self) -> None:
        self.close()

    def close(self) -> None:
        """After a forward."""
        self.x: torch.Tensor | None = None
        """The stream: that of the stage before, or the one that this stage passes on."""
        self.is_met = False
        """Whether the forward has called a stand-in that gives the stream, or takes it."""
        self.is_open = False
        """Whether the next block of the stage is the first that runs; whether nothing has taken the stream."""
        self.last: torch.Tensor | None = None
        """Of the stream that leaves: the output of the last block that ran, or what entered. The model must pass it on as it is."""


class _Enter(_PassOn):
    """In the place of each block before a stage: returns the stream that the stage before has passed on."""

    def __init__(self, module: nn.Module, border: _Border) -> None:
        super().__init__(module)
        self._border = border

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._border.is_met = True
        return self._border.x


class _Leave(_PassOn):
    """In the place of each module after a stage's blocks: the first one that gets the stream takes it, and the stage passes it on.

    `is_block`: it is in the place of a block, which gets the stream always. Other modules may be called with anything.
    """

    def __init__(self, module: nn.Module, border: _Border, *, is_block: bool) -> None:
        super().__init__(module)
        self._border, self._is_block = border, is_block

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        border = self._border
        if border.is_open and (self._is_block or (border.last is not None and _is_same(x, border.last))):
            if border.last is not None and not _is_same(x, border.last):
                raise _between()
            border.x, border.is_met, border.is_open = x, True, False
        return x


def _is_same(x: Any, y: torch.Tensor) -> bool:
    """Whether two tensors are the same memory; autograd's wrappers of a tensor differ. Also for tensors without memory."""
    if not isinstance(x, torch.Tensor) or x.shape != y.shape or x.storage_offset() != y.storage_offset():
        return False
    return bool(x.untyped_storage()._cdata == y.untyped_storage()._cdata)


def _between() -> ValueError:
    return ValueError(
        "pipeline: the model computes with the stream between two blocks, for example adds a residual there, and at a border of stages "
        "this would be done twice; let the blocks do it"
    )


def _skipped() -> ValueError:
    return ValueError(
        "pipeline: the model's forward calls no block through which the stream enters or leaves a stage, because it skips all blocks "
        "there and computes with the stream between them; let a block that is skipped return its input"
    )


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
        self._borders = {
            stage: (_Border(), _Border()) for stage in mine
        }  # where the stream enters, and where it leaves
        self._stand_ins = {stage: self._stand_ins_of(stage) for stage in mine}
        self._whole_forward = model.forward
        model.forward = self._forward
        self._split = {stage: split for stage in mine if (split := self._split_stream(division[stage])) is not None}
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
            self._watch_borders(stage)
        self._is_called = False

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

    def _watch_borders(self, stage: int) -> None:
        """Check that nothing is computed between the blocks of two stages, which would be computed twice."""
        enter, leave = self._borders[stage]

        def comes(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._stage != stage or not enter.is_open or enter.x is None:
                return  # also where a backward computes a block again
            enter.is_open = False
            stream, *others = (*args, *kwargs.values())
            if not _is_same(stream, enter.x):
                raise _between()
            if any(isinstance(x, torch.Tensor) and _is_same(x, enter.x) for x in others):
                raise ValueError(
                    f"pipeline: {type(block).__name__} gets the stream of the first block as one more argument; the later stages of a "
                    "pipeline do not have it"
                )

        def goes(block: nn.Module, args: Any, output: Any) -> None:
            if self._stage == stage and leave.is_open:
                leave.last = output

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
        if stage in self._split and torch.is_grad_enabled():
            x = self._split[stage].at_place(x)
        named = {key: value for key, value in kwargs.items() if key != self._plan.input}
        return self.model(**named, **self._plan.options, **{self._plan.stream: x})

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the model: of one stage. Hooks before it, such as those of `fully_shard`, see all modules of this rank."""
        if not self._is_called:
            raise RuntimeError(
                f"this {type(self.model).__name__} is in stages, of which this rank has some; call step, evaluate or next_logits of "
                "its pipeline"
            )
        enter, leave = self._borders[self._stage]
        is_last = self._stage == self.num_stages - 1
        leave.is_open = not is_last
        if self._stage:
            # What the model computes from it before the blocks is not used.
            enter.x = leave.last = kwargs[self._plan.stream]
            enter.is_open = True
        try:
            with self._in_place(self._stand_ins[self._stage]):
                output = self._whole_forward(*args, **kwargs)
            if leave.is_open or (enter.is_open and not enter.is_met):
                raise _skipped()
            return output if is_last else leave.x
        finally:
            enter.close()
            leave.close()

    def _stand_ins_of(self, stage: int) -> dict[str, nn.Module]:
        """What stands in the place of each module that the stage does not have, by name."""
        plan, own = self._plan, self._division[stage]
        names = [f"{plan.blocks}.{key}" for key in self._blocks._modules]
        found: dict[str, nn.Module] = {}
        if stage:
            for name in plan.first:
                module = self.model.get_submodule(name)
                found[name] = _Nothing() if isinstance(module, nn.Embedding) else _PassOn(module)
        enter, leave = self._borders[stage]
        for at in range(own.start):
            found[names[at]] = _Enter(self.model.get_submodule(names[at]), enter)
            mark_places_after([(at, found[names[at]])])
        if stage < self.num_stages - 1:
            for name in (*names[own.stop :], *plan.last):
                found[name] = _Leave(self.model.get_submodule(name), leave, is_block=name in names)
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
