"""How the stream of activations passes through one stage: what stands in the places of other stages' modules, and what it checks."""

from enum import IntEnum
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from mpitrain.placement.stage_streams import SplitStream
from mpitrain.torch_glue.torch_internals import storage_of


class _At(IntEnum):
    """Where a forward of the model is, in one stage. It goes up only; the model may skip any of the blocks."""

    NOWHERE = 0
    """There is no forward of this stage: a backward that computes a block again changes nothing."""
    BEFORE = 1
    """No block has been called."""
    EARLIER = 2
    """The last block that was called is one of an earlier stage: its stand-in has given the stream."""
    WITHIN = 3
    """The last block that was called is one of the stage."""
    LATER = 4
    """A block of a later stage has been called: its stand-in has taken the stream, which the stage passes on."""


class Passage:
    """The stream in one stage, from the stage before to the stage behind, in one forward after the other.

    Between two blocks the model must pass the stream on as it is: the code there runs in the stages of both. What it computes before
    the first block that it calls, or behind the last one, is of the first and the last stage alone, whichever blocks these are.

    `comes`, `goes`: how the stream is split where it enters the stage, and where it leaves it.
    """

    def __init__(self, *, is_last: bool, comes: SplitStream | None, goes: SplitStream | None) -> None:
        self.comes, self._goes = comes, goes
        self._is_last = is_last
        self._at = _At.NOWHERE
        self._stream: torch.Tensor | None = None
        """What has entered, then the output of the last block that ran; None in the first stage before its first block."""
        self._replaced: list[tuple[StorageWeakRef, torch.Tensor]] = []
        """Streams that a block has got in place of another, as long as that one lives: a backward may compute the block again."""

    def begin(self, stream: torch.Tensor | None) -> None:
        """A forward begins, with the stream of the stage before; None in the first stage."""
        self._at, self._stream = _At.BEFORE, stream
        self._replaced = [(given, its) for given, its in self._replaced if not given.expired()]

    def close(self) -> None:
        """After a forward, also a failed one."""
        self._at, self._stream = _At.NOWHERE, None

    def give(self) -> Any:
        """The stream, in the place of a block of an earlier stage."""
        self._reach(_At.EARLIER)
        return self._stream

    def come(self, block: nn.Module, stream: Any = None, *others: Any) -> Any:
        """A block of the stage is called with these arguments; returns the stream that it gets."""
        if self._at is _At.NOWHERE:
            return self._again(stream)
        before = self._at
        self._reach(_At.WITHIN)
        if before >= _At.WITHIN or self._stream is None:
            return stream
        if any(isinstance(x, torch.Tensor) and _is_same(x, stream) for x in others):
            raise ValueError(
                f"pipeline: {type(block).__name__} gets the stream of the first block as one more argument; the later stages of a "
                "pipeline do not have it"
            )
        if _is_same(stream, self._stream):
            return stream
        if before is not _At.BEFORE:
            raise _between()
        # The model skips all blocks before, so what it has computed is what the first stage has computed before its first block.
        if isinstance(stream, torch.Tensor):
            self._replaced.append((StorageWeakRef(stream.untyped_storage()), self._stream))
        return self._stream

    def _again(self, stream: Any) -> Any:
        """The stream that a block has got in its forward, if a backward computes it again, as by torch's checkpoint around a call."""
        if isinstance(stream, torch.Tensor) and self._replaced:
            here = stream.untyped_storage()._cdata
            return next((its for given, its in self._replaced if given.cdata == here), stream)
        return stream

    def go(self, output: torch.Tensor) -> None:
        """A block of the stage has returned."""
        if self._at is _At.WITHIN:
            self._stream = output

    def meet(self, x: Any) -> None:
        """A module of the last stage is called. It may get anything."""
        if _At.BEFORE <= self._at <= _At.WITHIN and self._stream is not None and _is_same(x, self._stream):
            self._stream = x  # with the nodes that autograd's hooks of the block have added

    def take(self, x: Any) -> Any:
        """A block of a later stage is called with the stream; what it returns in this stage."""
        if self._at in (_At.NOWHERE, _At.LATER):
            return x
        if self._stream is not None and not _is_same(x, self._stream):
            if self._at is not _At.BEFORE:
                raise _between()
            x = self._stream
        self._at, self._stream = _At.LATER, self._passed_on(x)
        return self._stream

    def end(self) -> torch.Tensor | None:
        """The forward has ended: the stream that the stage passes on; None in the last stage. ValueError if it called no block."""
        if self._at is _At.BEFORE and (self._stream is None) != self._is_last:
            raise ValueError(
                "pipeline: the model's forward calls no block through which the stream enters or leaves a stage, because it skips all "
                "blocks; let a block that is skipped return its input"
            )
        if self._is_last:
            return None
        # Without a block of a later stage behind it, the stream is as the last block returned it.
        return self._stream if self._at is _At.LATER else self._passed_on(self._stream)

    def _reach(self, at: _At) -> None:
        if self._at is _At.NOWHERE:
            return
        if self._at > at:
            raise ValueError(
                "pipeline: the model's forward calls a block after one that follows it, as in a second round over them; a pipeline "
                "runs through its stages once, so call the blocks in their order"
            )
        if at is _At.EARLIER and self._at is _At.BEFORE and self.comes is not None and self._stream is not None:
            self._stream = self.comes.arrive(self._stream)
        self._at = at

    def _passed_on(self, x: Any) -> Any:
        return x if self._goes is None else self._goes.pass_on(x)


class PassOn(nn.Module):
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


class Nothing(nn.Module):
    """In the place of an embedding: returns zero, which a forward may add to the stream."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(())


class Enter(PassOn):
    """In the place of each block before a stage: returns the stream that the stage before has passed on."""

    def __init__(self, module: nn.Module, passage: Passage) -> None:
        super().__init__(module)
        self._passage = passage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._passage.give()


class Leave(PassOn):
    """In the place of each module after a stage's blocks. `is_block`: it is in the place of a block, which gets the stream always."""

    def __init__(self, module: nn.Module, passage: Passage, *, is_block: bool) -> None:
        super().__init__(module)
        self._passage, self._is_block = passage, is_block

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_block:
            return self._passage.take(x)
        self._passage.meet(x)
        return x


def _between() -> ValueError:
    return ValueError(
        "pipeline: the model computes with the stream between two blocks, for example adds a residual there, and at a border of stages "
        "this would be done twice; let the blocks do it"
    )


def _is_same(x: Any, y: torch.Tensor) -> bool:
    """Whether two tensors are the same memory; autograd's wrappers of a tensor differ. Also for tensors without memory."""
    if not isinstance(x, torch.Tensor) or x.shape != y.shape or x.storage_offset() != y.storage_offset():
        return False
    return storage_of(x) == storage_of(y)
