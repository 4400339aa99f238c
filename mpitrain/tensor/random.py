"""Random numbers of ranks that hold a model together: the same where the ranks hold the same part, different where parts differ.

The ranks of a group have the same state of torch's generator, the *common* state. Outside of regions and split stacks all ranks draw
the same numbers from it. A *scope* is one call of a module in which parts differ: a block whose tokens are split, or a region anywhere
else. A scope takes one number from the common state. Within the scope the generator has one of two seeds that follow from this number:
the rank's *own* seed where the rank has its own tokens, features or heads, and the *shared* seed where all ranks have the whole stream,
such as in the router of experts. The common state comes back at the end of the scope, also after an exception. Megatron-LM (1909.08053)
keeps a second state of the generator for this purpose, which its checkpoints must contain. Here nothing stays after a scope.

[Note: seeds] Each seed within a scope follows from the one before it, which is a part of the generator's state. So a forward that
activation checkpointing repeats from the middle of a scope draws the same numbers again: torch restores the state of its generators.
"""

from collections.abc import Iterable, Mapping, Set
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from collectives import Communicator
from mpitrain.tensor.plan import Style

_SHARED = 0


class _Ranks(Protocol):
    """What this module needs of `layers.TensorRanks`."""

    comm: Communicator
    cuts_tokens: bool


def separate(
    ranks: _Ranks,
    modules: Mapping[str, nn.Module],
    styles: Mapping[str, Style],
    *,
    regions: Set[str],
    blocks: Set[str],
    wholes: Set[str],
) -> None:
    """Let the modules of a model draw the right numbers.

    `blocks`: the names of blocks whose tokens are split, if any are. `wholes`: of modules in them that get all tokens.

    A scope begins only if one of its modules is in training mode. Measured on a CPU: a scope takes 11 microseconds (the state has 5
    KB), each change of the seed within it 5, and each check whether the seed must change 2. A block has one scope and four changes with
    sequence parallelism, and two scopes and four changes without it.
    """
    for name in (*sorted(blocks - regions), *sorted(regions)):
        scope = _Scope(ranks, modules[name], is_block=name not in regions)
        modules[name].register_forward_pre_hook(scope.begin, with_kwargs=True)
        modules[name].register_forward_hook(scope.end, always_call=True)
    for name in sorted(wholes):
        modules[name].register_forward_pre_hook(partial(_draw_shared, ranks))
        modules[name].register_forward_hook(partial(_leave_region, ranks, True))
    own: set[str] = set()
    for name, style in styles.items():
        if name not in regions and not _is_within(name, regions):
            continue
        if style.kind == "column" and not style.gathers:
            own.add(name)
        elif style.kind == "region":
            own.add(name)  # its parameters are cut
        if style.kind in ("row", "region"):
            is_cut = _is_within(name, blocks) and not _is_within(name, wholes)
            modules[name].register_forward_hook(partial(_leave_region, ranks, is_cut))
    for name in sorted(own & set(modules)):
        modules[name].register_forward_pre_hook(partial(_draw_own, ranks))


def _is_within(name: str, outer: Iterable[str]) -> bool:
    return any(not path or name.startswith(path + ".") for path in outer)


class _Scope:
    """The calls of one module in which parts differ."""

    def __init__(self, ranks: _Ranks, module: nn.Module, *, is_block: bool) -> None:
        self._ranks, self._is_block = ranks, is_block
        self._modules = tuple(module.modules())
        self._common: tuple[torch.Generator, torch.Tensor] | None = None  # the state to come back

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pre-hook of the module."""
        generator = _generator((*args, *kwargs.values()))
        who = _me(self._ranks) if self._is_block else _SHARED
        if _switch(generator, who, self._ranks) or (self._is_block and not self._ranks.cuts_tokens):
            return  # this is a region within a block; or the block's tokens are whole
        if any(part.training for part in self._modules):
            # From the host's generator: for a number from a GPU's generator the host would wait.
            number = int(torch.randint(1 << 31, (), device="cpu").item())
            self._common = generator, generator.get_state()
            generator.manual_seed(_seed(number, who))

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook, also called after an exception."""
        if self._common is not None:
            (generator, state), self._common = self._common, None
            generator.set_state(state)


def _draw_own(ranks: _Ranks, module: nn.Module, args: Any) -> None:
    """A forward pre-hook of a layer whose output has this rank's own features."""
    _switch(_generator(args), _me(ranks), ranks)


def _draw_shared(ranks: _Ranks, module: nn.Module, args: Any) -> None:
    """A forward pre-hook of a module that all ranks compute alike."""
    _switch(_generator(args), _SHARED, ranks)


def _leave_region(ranks: _Ranks, is_cut: bool, module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook of a layer or a module whose output is whole, or has this rank's own tokens if `is_cut`."""
    _switch(_generator(args), _me(ranks) if is_cut and ranks.cuts_tokens else _SHARED, ranks)


def _switch(generator: torch.Generator, who: int, ranks: _Ranks) -> bool:
    """Give the generator the shared seed, or a rank's own seed, if it does not have it. Returns whether a scope is under way."""
    seed = generator.initial_seed()
    number = seed >> 32
    if seed == _seed(number, who):
        return True
    if seed != _seed(number, _SHARED) and seed != _seed(number, _me(ranks)):
        return False
    generator.manual_seed(_seed(_mixed(seed & ~_LOW) >> 33, who))
    return True


def _me(ranks: _Ranks) -> int:
    return ranks.comm.rank + 1


_LOW = (1 << 32) - 1


def _seed(number: int, who: int) -> int:
    """The seed of `who`: `_SHARED`, or a rank + 1. The upper half is the 31-bit number, and the lower half is mixed from it and `who`.

    torch's generator of the CPU takes its numbers from the lower half alone, and its state contains both.
    """
    return number << 32 | _mixed(number << 32 | who) & _LOW


def _mixed(x: int) -> int:
    """64 bits, each of which depends on all of `x`: SplitMix64's function (Steele, Lea and Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) % (1 << 64)
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    x = (x ^ x >> 27) * 0x94D049BB133111EB % (1 << 64)
    return x ^ x >> 31


def _generator(values: Iterable[Any]) -> torch.Generator:
    """The generator of the device on which the stream is: the first floating-point tensor."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            if value.device.type == "cuda":
                return torch.cuda.default_generators[value.device.index]
            break
    return torch.default_generator
