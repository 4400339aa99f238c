"""Which parts of a model to gather, use and reduce as one, where the user names none: the blocks of its stacks."""

from collections import Counter
from collections.abc import Iterator

from torch import nn

from mpitrain.sharding.readiness import kind_of


def stacked_blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks of the outermost stacks in a module, in order; none if it has no stack.

    A stack is a ModuleList, Sequential or ModuleDict that holds two or more modules of one class which have parts of their own: the
    layers of a transformer, the stages of a convolutional net. A block whose parameters are used outside it as well is left out; so are
    experts, of which each rank uses others, while all ranks have to gather the same units.
    """
    users = Counter(id(param) for part in module.modules() for param in part._parameters.values() if param is not None)
    blocks = []
    for block in _blocks(module):
        within = Counter(
            id(param) for part in block.modules() for param in part._parameters.values() if param is not None
        )
        if within and all(users[key] == count for key, count in within.items()):
            blocks.append(block)
    return blocks


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    children = dict(module.named_children())
    composite = Counter(kind_of(child) for child in children.values() if next(child.children(), None) is not None)
    for name, child in children.items():
        if "expert" in name.lower():
            continue
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict) and composite[kind_of(child)] > 1:
            yield child
        else:
            yield from _blocks(child)
