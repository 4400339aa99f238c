"""One sharded parameter."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from mpitrain.placement.boxes import ShardBox
from mpitrain.sharding.ranks import DataParallelRanks
from mpitrain.torch_glue.torch_internals import in_functional_call


@dataclass(eq=False)
class ShardedParameter:
    """A parameter as two `nn.Parameter` objects that live as long as its unit.

    `full`: the whole parameter, which the modules see in forward and backward. `shard`: this rank's rows, `box`, which the modules see
    at other times, and which the optimizer updates.
    """

    name: str
    users: list[tuple[nn.Module, str]]  # the modules that use it, and their names for it; several for tied weights
    full: nn.Parameter
    shard: nn.Parameter
    box: ShardBox
    ranks: DataParallelRanks  # the ranks that hold the other rows, and copies of these rows
    from_meta: bool = False  # made without values
    # A node of autograd that lets no gradient into the shard: `refuse_gradient` in step/checks/reach.py.
    refusal: Any = None

    def __post_init__(self) -> None:
        self._memory = self.shard.data_ptr(), self.shard.dtype

    @property
    def lacks_values(self) -> bool:
        """Whether this rank's rows were made without values and have never been written."""
        return self.from_meta and self.shard.numel() > 0 and self.shard._version == 0

    def check(self, shown: nn.Parameter | None) -> None:
        """RuntimeError if a module shows another parameter in place of this one, or if the memory of the shard was replaced."""
        if (self.shard.data_ptr(), self.shard.dtype) != self._memory:
            raise RuntimeError(
                f"the memory of parameter {self.name} was replaced after fully_shard (by param.data = ..., or by casting or moving a "
                "part of the model), and its new values would be lost; write into it instead (with torch.no_grad(): param.copy_(...))"
            )
        if shown is not self.shard and shown is not self.full:
            if in_functional_call():
                raise RuntimeError(functional_call(self.name))
            raise RuntimeError(
                f"parameter {self.name} was replaced after fully_shard, and neither its shards nor its gradient would follow; "
                "replace parameters before fully_shard, or write new values into the shard (with torch.no_grad(): param.copy_(...))"
            )


def functional_call(name: str) -> str:
    """The error for a tensor that `torch.func.functional_call` has put in the place of a parameter."""
    return (
        f"torch.func.functional_call has put another tensor in the place of parameter {name}, which is sharded: each rank has only its "
        "own rows between forwards; call it inside `with mpitrain.unshard(model, write=True):`, where named_parameters() gives whole "
        "parameters and a forward is that of the plain model"
    )
