"""Fences: no rank reads a parameter while another one writes it.

[Note: fences] With resident units a rank's shards are rows of parameters that its neighbours read. A shard is therefore written only
between the fence that closes every forward and backward of the outermost module and the fence that opens the next forward; the
optimizer, `load` and whoever else writes shards does it there and nowhere else. A fence is a barrier of the ranks of the node: past the
opening one all have finished writing, past the closing one all have finished reading. Ranks of other nodes read copies, which are
brought up to date by an all-gather which each rank begins before the opening fence. Where that goes on while ranks compute, a rank
waits for a unit's before the unit's module runs, and shows the full parameters then; for the rest before the closing fence. It writes
rows of other nodes alone, into the full parameters that are not in use before its end, and reads shards, which are written again past
the closing fence only. Since each rank begins it after its own writing, and it ends when all have taken part, whoever waited for it
reads what is new. Units whose module did not run in the last forward are waited for at once: others may use their parameters.

[Note: fence put off] After a forward that a backward will follow a rank passes the closing fence without waiting: it comes to the
barrier, and goes on. The fence that closes the backward stands for it. Whatever else could write shards before that (an optimizer,
an EMA, whoever asks the model for its parameters) first waits until all have come: `before_writes` in step.py. Who kept a shard from
before and writes to it meanwhile gets an error, by its version counter.
"""

from collections.abc import Sequence

import torch

from collectives import Communicator, Work
from mpitrain.sharding.torch_internals import count_writes


class Fence:
    """Of one model. `node`: the ranks that share its parameters; None where none do, and nobody has to wait. `shards`: this rank's."""

    def __init__(self, node: Communicator | None, shards: Sequence[torch.Tensor]) -> None:
        self._node, self._shards = node, shards
        self._barrier: Work | None = None  # put off
        self._writes = 0  # to the shards until then

    @property
    def num_ranks(self) -> int:
        """Those that come to it; 0 where nobody has to."""
        return 0 if self._node is None else self._node.size

    def wait(self) -> None:
        """All ranks come to it, and none goes on before."""
        if self._node is not None:
            self._node.barrier()

    def put_off(self) -> None:
        """Come to it and go on: see [Note: fence put off]."""
        if self._node is not None:
            self._barrier, self._writes = self._node.barrier(async_op=True), count_writes(self._shards)

    def settle(self) -> None:
        """Wait for the fence that was put off, if one was. Not collective."""
        if self._barrier is not None:
            self._barrier.wait()
            self.forget()

    def go_on(self) -> None:
        """The step goes on, and the next fence stands for the one that was put off, if one was."""
        if self._barrier is None:
            return
        self.forget()
        if count_writes(self._shards) != self._writes:
            raise RuntimeError(
                "parameters were written between a forward that recorded a graph and what came next, while other ranks may have been "
                "reading them; run a forward without backward under torch.no_grad(), or get the parameters to write to anew from "
                "model.parameters()"
            )

    def forget(self) -> None:
        """The one that was put off."""
        self._barrier = None
