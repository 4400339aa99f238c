"""The words of hang reports for a rank that is in a sharded model: the module, and its pass, a forward or a backward.

The words cost a call no time, because a report reads the stack of a rank (collectives/diagnosis/stacks.py).
"""

from collectives.diagnosis import stacks
from mpitrain.sharding.module import ShardedModule
from mpitrain.sharding.step.changes import Fence
from mpitrain.sharding.step.reducer import Reducer
from mpitrain.sharding.step.step import TrainingStep
from mpitrain.sharding.unit.unit import kind_of


def name_places() -> None:
    """Let reports leave out the code of torch and of this package, and describe the action of this package's functions instead."""
    inner = ("weights", "tensor", "optim", "placement")
    stacks.pass_over("torch", __name__.rpartition(".")[0], *(f"mpitrain.{name}" for name in inner))
    stacks.name(ShardedModule.__call__, lambda local: f"the forward of {_name(local['self'])}")
    stacks.name(TrainingStep._enter, lambda local: f"the backward of {local['call'].unit.name}")
    stacks.name(TrainingStep._complete, lambda local: f"the backward of {local['unit'].name}")
    stacks.name(
        TrainingStep.on_gradient,
        lambda local: f"the backward of {local['self'].reducer.gradients[local['number']][0].name}",
    )
    stacks.name(TrainingStep._end_backward, lambda local: f"the end of the backward of {local['self'].units[0].name}")
    stacks.name(
        Reducer._end_one, lambda local: f"the backward, which reduces the gradients of {_reduced(local['self'])}"
    )
    stacks.name(Fence.end, lambda local: "the wait for the other ranks' forwards, before parameters may be written")


def _name(module: ShardedModule) -> str:
    return module._unit.name or kind_of(module).__name__


def _reduced(reducer: Reducer) -> str:
    return next(unit.name for unit, gradients in reducer.gradients if gradients is reducer.reducing)
