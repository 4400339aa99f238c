"""Plans: patterns of module names, and how each of these modules is cut. Plain data.

    {"blocks.*.attn.qkv": Style("column", parts=3, blocks=12), "blocks.*.attn.proj": Style("row"), "wte": Style("vocabulary"), ...}

A `*` in a pattern stands for one part of a name between dots.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Kind = Literal["column", "row", "vocabulary", "experts", "loss", "gather", "divide"]


@dataclass(frozen=True)
class Style:
    """How one module is cut over the ranks.

    kind: "column": each rank computes a part of the output features. "row": each rank has a part of the input features, and the ranks'
    outputs are added. "vocabulary": each rank has a part of an embedding's rows. "experts": a module with stacked matrices (E, out, in)
    of E experts, each of which is cut; the output of the module around it is added. "loss": an `nn.CrossEntropyLoss` of logits whose
    last dimension is cut. "gather": the last dimension of the module's output is gathered. "divide": numbers of a module that count its
    features or heads.

    parts: the matrices that lie end to end in the weight (3 for query, key and value), each of which is cut. blocks: the indivisible
    blocks of each of these matrices, such as attention heads; None: single features. is_shared: the blocks may be fewer than the ranks;
    then several ranks have each block (the key and value heads of grouped queries). is_even: all ranks must have the same number of
    blocks. gathers: all output features of a column layer are gathered. splits: the input of a row layer has all features. names: of
    "divide" the attributes, of "experts" the parameters: first those cut by output features (`parts` matrices each), last one cut by
    input features.
    """

    kind: Kind
    parts: int = 1
    blocks: int | None = None
    is_shared: bool = False
    is_even: bool = True
    gathers: bool = False
    splits: bool = False
    names: tuple[str, ...] = ()


Plan = Mapping[str, Style]
"""Patterns of module names, each with its style. The first pattern that matches a name counts."""


def styles_of(names: Iterable[str], plan: Plan) -> dict[str, Style]:
    """The style of each module that the plan names, in the order of `names`. ValueError for a pattern that matches no name."""
    found: dict[str, Style] = {}
    unused = set(plan)
    for name in names:
        for pattern, style in plan.items():
            if pattern.count(".") == name.count(".") and fnmatchcase(name, pattern):
                unused.discard(pattern)
                found.setdefault(name, style)
    if unused:
        raise ValueError(f"no module of the model matches {', '.join(map(repr, sorted(unused)))} of the plan")
    return found


def region_of(name: str) -> str:
    """The module whose forward contains a cut module: its parent."""
    return name.rpartition(".")[0]
