"""Fences: no rank reads a parameter while another one writes it.

[Note: fences] With resident units a rank's shards are rows of parameters that the other ranks of its node read. So a rank writes a
shard only between two fences: the closing fence at the end of every forward and backward of the outermost module, and the opening fence
of the next forward. The optimizer, `load` and all other code that writes shards runs there. A fence is a barrier of the ranks of a
node. After the opening fence all ranks have finished writing; after the closing fence all ranks have finished reading. Ranks of other
nodes read copies. Each rank begins the all-gather that updates the copies before the opening fence. If the all-gather overlaps with
computation, a rank waits for the all-gather of a unit before the unit's module runs, and shows the full parameters then. It waits for
the other units before the closing fence. The all-gather writes only rows of other nodes, into full parameters that are not in use
before its end, and reads shards, which no rank writes before the closing fence. Each rank begins the all-gather after its own writes,
and the all-gather ends when all ranks have taken part, so a rank that has waited for it reads new values. A rank waits at once for
units whose module did not run in the last forward, because other modules may use their parameters.

[Note: fence put off] If a backward will follow a forward, a rank passes the closing fence without waiting: it enters the barrier, and
continues. The fence at the end of the backward replaces this one. Other code that could write shards earlier (an optimizer, an EMA,
code that asks the model for its parameters) first waits until all ranks have entered the barrier: `before_writes` in step.py. Code that
writes to a shard that it got earlier causes an error, found by the shard's version counter.
"""

from collections.abc import Sequence

import torch

from collectives import Communicator, Work
from mpitrain.torch_glue.torch_internals import count_writes


class Fence:
    """The fence of one model. `node`: the ranks that share its parameters; None without shared parameters. `shards`: this rank's."""

    def __init__(self, node: Communicator | None, shards: Sequence[torch.Tensor]) -> None:
        self._node, self._shards = node, shards
        self._barrier: Work | None = None  # the barrier of a fence that was put off
        self._writes = 0  # the count of writes to the shards when the fence was put off

    @property
    def num_ranks(self) -> int:
        """The number of ranks that take part; 0 without shared parameters."""
        return 0 if self._node is None else self._node.size

    def wait(self) -> None:
        """Wait until all ranks have reached the fence."""
        if self._node is not None:
            self._node.barrier()

    def put_off(self) -> None:
        """Enter the fence's barrier without waiting: see [Note: fence put off]."""
        if self._node is not None:
            self._barrier, self._writes = self._node.barrier(async_op=True), count_writes(self._shards)

    def settle(self) -> None:
        """Wait for the fence that was put off, if one was. Not collective."""
        if self._barrier is not None:
            self._barrier.wait()
            self.forget()

    def go_on(self) -> None:
        """The step continues: the next fence replaces the fence that was put off. RuntimeError if shards were written meanwhile."""
        if self._barrier is None:
            return
        self.forget()
        if count_writes(self._shards) != self._writes:
            raise RuntimeError(
                "parameters were written between a forward that recorded a graph and the next pass, while other ranks may have been "
                "reading them; run a forward without backward under torch.no_grad(), or call model.parameters() again before you "
                "write to the parameters"
            )

    def forget(self) -> None:
        """Forget the fence that was put off."""
        self._barrier = None
