"""Which modules of a model the stages of a pipeline have: plain data."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StagePlan:
    """The parts of a model that is a list of blocks, by the names of its modules.

    first: the modules before the blocks, which the first stage has. blocks: the `nn.ModuleList` that is divided over the stages; each
    block takes the stream, a tensor, as its first argument, and returns it. last: the modules after the blocks, which the last stage
    has, in the order in which the model calls them. In other stages they pass on what they get, and an embedding returns zero. stream:
    the argument by which the model's forward takes the output of an earlier stage, in place of its `input`: a named argument that only
    the first stage gets. options: more arguments of each forward. Modules that the plan does not name are in each stage.
    """

    first: tuple[str, ...]
    blocks: str
    last: tuple[str, ...]
    stream: str
    input: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def layer_of(self, name: str) -> str:
        """The layer of a parameter: "embedding" (what comes before the blocks), "blocks.N", or "head" (what comes after them).

        ValueError for a parameter of no module of the plan.
        """
        module = name.partition(".")[0]
        if name.startswith(f"{self.blocks}."):
            return f"blocks.{name.removeprefix(f'{self.blocks}.').partition('.')[0]}"
        if module in self.first or module in self.last:
            return "embedding" if module in self.first else "head"
        raise ValueError(f"the plan of the model's stages names no module of the parameter {name}")
