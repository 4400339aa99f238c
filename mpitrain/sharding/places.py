"""What reports of waits say of a rank that is in a sharded model: in which module, in its forward or in its backward.

Functions get names here, which cost a call nothing: who asks where a rank is looks at its stack (collectives/diagnosis/stacks.py).
"""

from collections.abc import Mapping
from typing import Any

from collectives.diagnosis import stacks
from mpitrain.sharding.module import ShardedModule
from mpitrain.sharding.setup.readiness import kind_of
from mpitrain.sharding.step.context import Context
from mpitrain.sharding.step.fences import Fence
from mpitrain.sharding.step.reductions import Reductions
from mpitrain.sharding.step.state import State


def name_places() -> None:
    """Take no place in torch, in the files beside this one and in what saves and loads a model; name what they do."""
    stacks.pass_over("torch", __name__.rpartition(".")[0], "mpitrain.full_state", "mpitrain.state", "mpitrain.weights")
    stacks.name(ShardedModule.__call__, _forward)
    stacks.name(State._before_backward, lambda local: f"the backward of {local['self'].name}")
    stacks.name(State.after_backward, lambda local: f"the backward of {local['self'].name}")
    stacks.name(Context.on_grad, _gradient)
    stacks.name(Context.end_backward, lambda local: f"the end of the backward of {local['self'].states[0].name}")
    stacks.name(Reductions._end_one, _reduction)
    stacks.name(Fence.settle, lambda local: "the wait for the other ranks' forwards, before parameters may be written")


def _forward(local: Mapping[str, Any]) -> str:
    module = local["self"]
    return f"the forward of {module._sharding.name or kind_of(module).__name__}"


def _gradient(local: Mapping[str, Any]) -> str:
    state, _ = local["self"]._groups[local["number"]]
    return f"the backward of {state.name}"


def _reduction(local: Mapping[str, Any]) -> str:
    reductions = local["self"]
    name = next(state.name for state, group in reductions.order if group is reductions._reducing)
    return f"the backward, which reduces the gradients of {name}"
