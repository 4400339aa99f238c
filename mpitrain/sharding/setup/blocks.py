"""The parts of a model that become units if the user chooses no parts: the blocks of its stacks, and the modules of `keep_fp32`.

A call of `fully_shard` for a part does not see the model around it: a name in `keep_fp32` without a module in one block may have one in
the next block. So the names are checked for a whole model, and again at its first forward (readiness.py).
"""

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from mpitrain.placement import parts
from mpitrain.sharding.unit.policy import names
from mpitrain.sharding.unit.unit import kind_of, unit_of


def stacked_blocks(module: nn.Module, *, in_stages: bool = False) -> list[nn.Module]:
    """The blocks of the outermost stacks in a module, in order; empty if it has no stack.

    A stack is a ModuleList, Sequential or ModuleDict that holds two or more modules of one class with child modules: the
    layers of a transformer, the stages of a convolutional net. A module without a forward cannot be a block, because parameters are
    gathered around a forward. The children of such modules in a stack (the lists of a U-Net's stages) count as children of the stack.
    Modules whose parameters are also used elsewhere are no blocks. Experts are no blocks either, because ranks use different experts,
    but must gather the same units. `in_stages`: the blocks that a pipeline divides are a stack on every rank, also if this rank has one
    of them or none.
    """
    users = Counter(id(param) for part in module.modules() for param in part._parameters.values() if param is not None)
    blocks = []
    for block in _blocks(module, in_stages):
        within = Counter(
            id(param) for part in block.modules() for param in part._parameters.values() if param is not None
        )
        if within and all(users[key] == count for key, count in within.items()):
            blocks.append(block)
    return blocks


def check_names(module: nn.Module, keep_fp32: Iterable[str]) -> None:
    """ValueError for a pattern of `keep_fp32` that matches no module of `module`, by its name there or in a sharded part."""
    left = set(keep_fp32)
    if not left:
        return
    known: set[str] = set()
    for part in module.modules():
        if part is module or unit_of(part) is not None:
            for name, inner in part.named_modules():
                kind = kind_of(inner)
                known |= {name, kind.__name__}
                left -= {pattern for pattern in left if names(pattern, name, kind)}
    for pattern in sorted(left):
        near = difflib.get_close_matches(pattern, known, n=1)
        raise ValueError(
            f"MixedPrecisionPolicy: keep_fp32 has {pattern!r}, which is neither a class nor a name of a module of this "
            f"{kind_of(module).__name__}" + (f"; did you mean {near[0]!r}?" if near else "")
        )


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called. A ModuleList, for instance, only holds other modules."""
    return kind_of(module).forward is not nn.Module.forward or "forward" in vars(module)


def _blocks(module: nn.Module, in_stages: bool) -> Iterator[nn.Module]:
    is_stack = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    children = list(_callable(module) if is_stack else _without_experts(module))
    composite = Counter(kind_of(child) for child in children if next(child.children(), None) is not None)
    for child in children:
        if (is_stack and composite[kind_of(child)] > 1) or (in_stages and parts.is_stack(module)):
            yield child
        else:
            yield from _blocks(child, in_stages)


def _callable(stack: nn.Module) -> Iterator[nn.Module]:
    """The children of a stack. A child without a forward is replaced by its own children."""
    for child in _without_experts(stack):
        if has_forward(child):
            yield child
        else:
            yield from _callable(child)


def _without_experts(module: nn.Module) -> Iterator[nn.Module]:
    return (child for name, child in module.named_children() if "expert" not in name.lower())
