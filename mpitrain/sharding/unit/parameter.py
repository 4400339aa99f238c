"""One sharded parameter, and its guards: of its shard, and of the modules that use it.

A shard lets no gradient in, and cannot be pickled; `ckpt.save` calls its `refuse_as_whole`. The messages are those of
step/checks/reach.py and placement/part_tensor.py.

[Note: guards] While modules show shards, a call of one of them must not compute with this rank's rows in place of the parameters. A
guard takes the place of a module's `forward`, as an attribute of the module, from `put` to `lift`. So it is there only while the module
shows shards. In a forward the modules are as the user made them: no call takes longer, torch's compiler sees no code of ours, and
torch's fast paths (such as that of nn.TransformerEncoderLayer), which hooks would turn off, stay.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from mpitrain.placement.part_tensor import IN_UNSHARD, refuse, refuse_whole
from mpitrain.placement.parts import ShardBox, part_of
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

    def __post_init__(self) -> None:
        self._memory = self.shard.data_ptr(), self.shard.dtype
        self._node: Any = None  # of autograd, which gets the gradients of the shard

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

    def guard_gradient(self, refuse: "Callable[[ShardedParameter], NoReturn]") -> None:
        """Let a backward that reaches the shard call `refuse`.

        A hook of the tensor itself would be seen by optimizers and by `show_full`. The node refers to the shard, so it refers to the
        parameter weakly.
        """
        shard, is_trained, this = self.shard, self.shard.requires_grad, weakref.ref(self)
        if not (shard.is_floating_point() or shard.is_complex()):
            return

        def reached(grads: Any) -> None:
            if (param := this()) is not None:
                refuse(param)

        with torch.enable_grad(), torch.inference_mode(False):
            shard.requires_grad_(True)
            self._node = shard.view_as(shard).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            shard.requires_grad_(is_trained)
        self._node.register_prehook(reached)


def guard_shards(params: Sequence[ShardedParameter]) -> None:
    """Let the shards of a unit, but not copies of them, raise an error when they are pickled. A subclass would be visible to optimizers
    and hooks.

    The modules that use them refuse whole tensors in a state dict, with advice.
    """
    if not params or params[0].ranks.shard.size == 1:
        return
    shards = {id(param.shard): weakref.ref(param) for param in params}
    for user in {id(module): module for param in params for module, _ in param.users}.values():
        user.register_load_state_dict_pre_hook(partial(_refuse_whole_tensors, shards))
    for param in params:
        param.shard.__reduce_ex__ = param.shard.refuse_as_whole = partial(_refuse_shard, weakref.ref(param))  # type: ignore


def _refuse_shard(reference: "weakref.ref[ShardedParameter]", protocol: Any = None) -> NoReturn:
    param = reference()
    assert param is not None
    refuse(param.name, param.box.shape, param.box.full_shape, remedy_for(param))


def _refuse_whole_tensors(
    shards: Mapping[int, "weakref.ref[ShardedParameter]"],
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    *args: Any,
) -> None:
    """RuntimeError in place of a line of torch's for each tensor of another shape."""
    for key, shown in module._parameters.items():
        given = getattr(state_dict.get(prefix + key), "shape", None)
        if shown is None or given is None or given == shown.shape or id(shown) not in shards:
            continue
        param, part = shards[id(shown)](), part_of(shown)
        if param is not None and given in (param.full.shape, None if part is None else part.full_shape):
            refuse_whole(prefix + key, shown.shape, given)


def remedy_for(param: ShardedParameter) -> str:
    """Within `unshard` a parameter that only `fully_shard` has divided is whole."""
    part = part_of(param.shard)
    return IN_UNSHARD if part is None or not (part.is_cut or part.is_in_stages) else ""


def functional_call(name: str) -> str:
    """The error for a tensor that `torch.func.functional_call` has put in the place of a parameter."""
    return (
        f"torch.func.functional_call has put another tensor in the place of parameter {name}, which is sharded: each rank has only its "
        "own rows between forwards; call it inside `with mpitrain.unshard(model, write=True):`, where named_parameters() gives whole "
        "parameters and a forward is that of the plain model"
    )


Outside = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""What a call does while the module shows shards: `outside(module, forward, args, kwargs)`."""


class Guard:
    """In the place of the `forward` of `module`. `attribute`: the module's own attribute of that name; None: its class has the method.

    References are weak, so that a model without other references is freed at once.
    """

    def __init__(self, guards: "Guards", module: nn.Module, attribute: Callable[..., Any] | None) -> None:
        self.attribute = attribute
        self._guards, self._module = weakref.ref(guards), weakref.ref(module)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward, which `inspect.signature` reads."""
        module = self._module()
        found: Callable[..., Any] = self.attribute or type(module).forward.__get__(module)  # type: ignore[union-attr]
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        guards, module = self._guards(), self._module()
        if (
            guards is None or guards.are_lifted
        ):  # code that has kept this guard, as a wrapper does, calls it in a forward
            return self.__wrapped__(*args, **kwargs)
        assert module is not None
        return guards.outside(module, self.__wrapped__, args, kwargs)

    def is_of(self, module: nn.Module) -> bool:
        """Whether the guard is that of a module, and not one that the user has put there from another module."""
        return self._module() is module

    def over(self, module: nn.Module, attribute: Callable[..., Any] | None) -> "Guard":
        """A guard of the same unit for another forward."""
        guards = self._guards()
        assert guards is not None
        return Guard(guards, module, attribute)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "a part of a sharded model cannot be copied, because this rank has only its own rows; copy it before fully_shard, or "
            "within `with mpitrain.unshard(model):`"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a part of a sharded model cannot be pickled; use mpitrain.save, or mpitrain.full_state_dict")


class Guards:
    """The guards of one unit. `modules`: those that use its parameters, or that have such a module in them."""

    def __init__(self, modules: Sequence[nn.Module], outside: Outside) -> None:
        self.outside = outside
        self.are_lifted = True
        self.entries: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """The modules whose calls `register_forward_method` has made forwards."""
        self._modules = [weakref.ref(module) for module in modules]
        self._guards = [Guard(self, module, vars(module).get("forward")) for module in modules]

    def has(self, module: nn.Module) -> bool:
        """Whether a module is guarded."""
        return any(reference() is module for reference in self._modules)

    def put(self) -> None:
        """Guard the modules, because they show shards."""
        if not self.are_lifted:
            return
        self.are_lifted = False
        for index, module, place, guard in self._each():
            now = place.get("forward")
            if now is not guard and now is not guard.attribute:  # the user has replaced the forward
                self._guards[index] = guard = Guard(self, module, now)
            place["forward"] = guard

    def lift(self) -> None:
        """Give the modules their own `forward` back."""
        if self.are_lifted:
            return
        self.are_lifted = True
        for _, _, place, guard in self._each():
            if place.get("forward") is not guard:
                continue  # the user's
            if guard.attribute is None:
                del place["forward"]
            else:
                place["forward"] = guard.attribute

    def _each(self) -> Iterator[tuple[int, nn.Module, dict[str, Any], Guard]]:
        """Each module with its attributes and its guard: the one in its place, because the user may have put an earlier one back."""
        for index, reference in enumerate(self._modules):
            module, guard = reference(), self._guards[index]
            if module is None:
                continue  # the user has removed it from the model
            place = vars(module)
            now = place.get("forward")
            if now is not guard and isinstance(now, Guard) and now.is_of(module):
                self._guards[index] = guard = now
            yield index, module, place, guard


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """A module's forward without a guard."""
    now = vars(module).get("forward")
    return now.__wrapped__ if isinstance(now, Guard) else module.forward


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a module another forward, beneath its guard."""
    now = vars(module).get("forward")
    module.forward = now.over(module, forward) if isinstance(now, Guard) else forward
