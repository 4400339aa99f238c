"""Plans: patterns of module names, and how each of these modules is cut. Plain data.

    {"blocks.*.attn.qkv": Style("column", parts=3, blocks=12), "blocks.*.attn.proj": Style("row"), "wte": Style("vocabulary"), ...}

A `*` in a pattern stands for one part of a name between dots.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

Kind = Literal[
    "column", "row", "vocabulary", "parameter", "region", "once", "whole", "loss", "gather", "divide"
]  # fmt: skip


@dataclass(frozen=True)
class Style:
    """How one module, or one parameter, is cut over the ranks.

    kind: "column": each rank computes a part of the output features. "row": each rank has a part of the input features, and the ranks'
    outputs are added. "vocabulary": each rank has a part of an embedding's rows. "parameter": a parameter that a module uses itself,
    such as the stacked matrices of experts, is cut along dimension `dim`. "region": the outputs that the ranks compute with the cut
    parameters of a module are added. "once": the output of an uncut module, or an uncut parameter, counts once in such a sum. "whole":
    with sequence parallelism a module between regions gets all tokens, and each rank computes with all of them. "loss": an
    `nn.CrossEntropyLoss` of logits whose last dimension is cut, or a transformers model that computes its own. "gather": the last
    dimension of the module's output is gathered. "divide": numbers of a module that count its features or heads.

    parts: the matrices that lie end to end in the weight (3 for query, key and value), each of which is cut. blocks: the indivisible
    blocks of each of these matrices, such as attention heads; None: single features. is_shared: the blocks may be fewer than the ranks;
    then several ranks have each block (the key and value heads of grouped queries). is_even: all ranks must have the same number of
    blocks. gathers: all output features of a column layer are gathered. splits: the input of a row layer has all features. names: of
    "divide" the attributes; of "loss" the layer whose outputs are the logits, if the plan has several that it may be. dim: of
    "parameter" the dimension.
    """

    kind: Kind
    parts: int = 1
    blocks: int | None = None
    is_shared: bool = False
    is_even: bool = True
    gathers: bool = False
    splits: bool = False
    names: tuple[str, ...] = ()
    dim: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"Style: unknown kind {self.kind!r}; expected one of {', '.join(get_args(Kind))}")
        if self.parts < 1 or (self.blocks is not None and self.blocks < 1):
            raise ValueError(f"Style: expected parts and blocks of at least 1, got {self.parts} and {self.blocks}")
        if self.kind == "divide" and not self.names:
            raise ValueError("Style: 'divide' needs names, the attributes that are divided")

    @property
    def is_of_parameter(self) -> bool:
        """Whether a pattern may name a parameter."""
        return self.kind in ("parameter", "once")


Plan = Mapping[str, Style]
"""Patterns of module names, each with its style. The first pattern that matches a name counts."""


def styles_of(modules: Iterable[str], plan: Plan, parameters: Iterable[str] = ()) -> dict[str, Style]:
    """The style of each module and parameter that the plan names, in the order of the names.

    ValueError for a pattern that matches no name.
    """
    for pattern, style in plan.items():
        if not isinstance(style, Style):
            raise ValueError(f"the plan has {style!r} for {pattern!r}; expected a mpitrain.tensor.Style")
    found: dict[str, Style] = {}
    unused = set(plan)
    for names, is_parameter in ((modules, False), (parameters, True)):
        for name in names:
            for pattern, style in plan.items():
                if not (style.is_of_parameter if is_parameter else style.kind != "parameter"):
                    continue
                if pattern.count(".") == name.count(".") and fnmatchcase(name, pattern):
                    unused.discard(pattern)
                    found.setdefault(name, style)
    if unused:
        raise ValueError(f"no module of the model matches {', '.join(map(repr, sorted(unused)))} of the plan")
    return found


def parent_of(name: str) -> str:
    """The module whose forward contains a module."""
    return name.rpartition(".")[0]


def is_within(name: str, module: str) -> bool:
    """Whether `name` is in a module, or is the module itself. "" is the model."""
    return not module or name == module or name.startswith(module + ".")
