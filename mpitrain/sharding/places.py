"""What reports of waits say of a rank that is in a sharded model: in which module, in its forward or in its backward.

Functions get names here, which cost a call nothing: who asks where a rank is looks at its stack (collectives/diagnosis/stacks.py).
"""

from collections.abc import Mapping
from typing import Any

from collectives.diagnosis import stacks
from mpitrain.sharding.module import ShardedModule
from mpitrain.sharding.setup.readiness import kind_of
from mpitrain.sharding.step.fences import Fence
from mpitrain.sharding.step.reducer import Reducer
from mpitrain.sharding.step.step import Step


def name_places() -> None:
    """Take no place in torch, in the files beside this one and in what saves and loads a model; name what they do."""
    stacks.pass_over("torch", __name__.rpartition(".")[0], "mpitrain.full_state", "mpitrain.state", "mpitrain.weights")
    stacks.name(ShardedModule.__call__, _forward)
    stacks.name(Step._before_backward, lambda local: f"the backward of {local['unit'].name}")
    stacks.name(Step._all_back, lambda local: f"the backward of {local['unit'].name}")
    stacks.name(Step.on_gradient, _gradient)
    stacks.name(Step._end_backward, lambda local: f"the end of the backward of {local['self'].units[0].name}")
    stacks.name(
        Reducer._end_one, lambda local: f"the backward, which reduces the gradients of {local['self'].reducing}"
    )
    stacks.name(Fence.settle, lambda local: "the wait for the other ranks' forwards, before parameters may be written")


def _forward(local: Mapping[str, Any]) -> str:
    module = local["self"]
    return f"the forward of {module._unit.name or kind_of(module).__name__}"


def _gradient(local: Mapping[str, Any]) -> str:
    unit, _ = local["self"].reducer.groups[local["number"]]
    return f"the backward of {unit.name}"
