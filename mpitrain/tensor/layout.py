"""Where a plan's regions are, and which tokens each module gets under sequence parallelism. No ranks, no changes of the model."""

from collections.abc import Mapping

from torch import nn

from mpitrain.tensor.plan import Style, is_within, parent_of

_TOKENWISE = (
    nn.Linear, nn.Identity, nn.modules.dropout._DropoutNd, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softmax,
)  # fmt: skip
"""Classes of modules that compute each token by itself. So do those whose name contains one of `_TOKENWISE_NAMES`."""
_TOKENWISE_NAMES = ("Norm", "Router", "Activation")
_MIXING_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm)
"""Norms over the tokens."""
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Classes of modules that compute nothing but what the modules in them compute."""


class TensorLayout:
    """The regions of a model, its stacks of blocks, and the modules in these stacks that get all tokens.

    `completes`: modules of a stack that may mix tokens and are not in the plan get all tokens. Their inputs and outputs are then
    streams of activations (..., L, C), as in the library transformers. Otherwise such a module is a ValueError.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], styles: Mapping[str, Style], *, sequence: bool, completes: bool
    ) -> None:
        self._modules, self._styles = modules, styles
        self.regions = {name for name, style in styles.items() if style.kind == "region"}
        """The names of modules whose outputs are sums over the ranks."""
        self.regions |= {self._region_of_row(name, style) for name, style in styles.items() if style.kind == "row"}
        for region in self.regions:
            if region and (outer := self.region(parent_of(region))) is not None:
                raise ValueError(
                    f"{region} is within {outer or 'the model'}, and both end with a sum over ranks; leave one of "
                    "them out of the plan"
                )
        self.heads = [name for name, style in styles.items() if style.kind == "column" and self.region(name) is None]
        """Column layers outside of regions: their outputs stay cut, or are gathered."""
        self.stacks = self._stacks() if sequence else {}
        """The outermost lists of blocks around regions, each with the names of its blocks."""
        self.wholes = {name for name, style in styles.items() if style.kind == "whole" and self._is_in_stack(name)}
        """The modules that get all tokens of a stream whose tokens are cut."""
        for path, blocks in self.stacks.items():
            for block in blocks:
                if not any(is_within(name, block) for name in self.regions | self.wholes):
                    if not completes:
                        raise ValueError(
                            f"the plan cuts nothing in {block}, but in other blocks of {path}; cut each, give it Style('whole'), "
                            "or pass sequence=False"
                        )
                    self.wholes.add(block)
                self._visit(block, completes=completes)
        for name in self.wholes:
            if (outer := self.region(name)) is not None:
                raise ValueError(f"{name} is within {outer}, where each rank has all tokens; it cannot be 'whole'")

    def region(self, name: str) -> str | None:
        """The region around a module."""
        while True:
            if name in self.regions:
                return name
            if not name:
                return None
            name = parent_of(name)

    def is_cut(self, name: str) -> bool:
        """Whether a module gets this rank's tokens alone, or for a region whether its stream comes and goes so."""
        return self._is_in_stack(name) and not any(is_within(name, whole) for whole in self.wholes)

    def _is_in_stack(self, name: str) -> bool:
        return any(name.startswith(path + ".") for path in self.stacks)

    def _region_of_row(self, name: str, style: Style) -> str:
        """The module around a row layer that contains the column layers before it, at most one block.

        A row layer that takes its part of a whole input may be alone. Then it is the region.
        """
        columns = [other for other, kind in self._styles.items() if kind.kind in ("column", "parameter")]
        region = parent = parent_of(name)
        if style.splits:
            return parent if any(parent_of(column) == parent for column in columns) else name
        while region and not any(is_within(column, region) for column in columns):
            if isinstance(self._modules[parent_of(region)], nn.ModuleList):
                return parent
            region = parent_of(region)
        return region or parent

    def _stacks(self) -> dict[str, list[str]]:
        stacks: dict[str, list[str]] = {}
        for region in sorted(self.regions):
            names = region.split(".") if region else []
            for end in range(1, len(names)):
                path = ".".join(names[:end])
                if isinstance(self._modules[path], nn.ModuleList):
                    stacks[path] = [f"{path}.{key}" for key, _ in self._modules[path].named_children()]
                    break
        return stacks

    def _visit(self, name: str, *, completes: bool) -> None:
        """Find what is to get all tokens in a module of a stack; see `completes` of the class."""
        module = self._modules.get(name)
        if module is None or name in self.regions or name in self.wholes:
            return  # None: a module that the model has under another name, too
        children = [f"{name}.{key}" for key, _ in module.named_children()]
        is_block = parent_of(name) in self.stacks
        if self._is_tokenwise(module):
            if completes and name in self._styles and self._styles[name].kind == "column":
                self.wholes.add(name)  # its outputs are gathered
        elif completes and not is_block and not isinstance(module, nn.ModuleList) and self._may_mix(name):
            self.wholes.add(name)
        elif children and (completes or is_block or isinstance(module, _CONTAINERS) or self._holds_region(name)):
            for child in children:
                self._visit(child, completes=completes)
        elif not completes and name not in self._styles:
            raise ValueError(
                f"{name} ({type(module).__name__}) is in a stack whose tokens are cut, and may mix tokens; cut its matrices by "
                "the plan, give it Style('whole'), or pass sequence=False"
            )

    @staticmethod
    def _is_tokenwise(module: nn.Module) -> bool:
        if isinstance(module, _MIXING_NORMS):
            return False
        return isinstance(module, _TOKENWISE) or any(key in type(module).__name__ for key in _TOKENWISE_NAMES)

    def _holds_region(self, name: str) -> bool:
        return any(is_within(region, name) for region in self.regions)

    def _may_mix(self, name: str) -> bool:
        """Whether a module computes something else than regions with streams of tokens."""
        inside = [region for region in self.regions if is_within(region, name)]
        return not inside or any(self._styles.get(region, Style("row")).kind == "region" for region in inside)
