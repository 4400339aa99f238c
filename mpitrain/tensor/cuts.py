"""Where the parameters of a model are cut, and whether the plan fits the model and the number of ranks."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from mpitrain.tensor import layers
from mpitrain.tensor.layers import features_of, has_own_product
from mpitrain.tensor.layout import Layout
from mpitrain.tensor.plan import Style, is_within, parent_of
from mpitrain.tensor.transformers.loss import computes_loss


class Cut(NamedTuple):
    """How a parameter is cut: along dimension `dim`, where matrices of `lengths` lie end to end; see `parts.cut`."""

    dim: int
    lengths: tuple[int, ...]
    blocks: int | None
    num_sharing: int
    """How many ranks have the same part."""


class Cuts:
    """The cuts of a plan over `size` ranks. ValueError for a style that does not fit its module, or the ranks.

    `is_library`: the plan is the library's, so the outputs of each layer that is cut must be gathered or added up.
    """

    def __init__(
        self,
        modules: Mapping[str, Any],
        params: Mapping[str, nn.Parameter],
        styles: Mapping[str, Style],
        layout: Layout,
        size: int,
        *,
        is_library: bool,
    ) -> None:
        self._params, self._styles, self._layout, self._size = params, styles, layout, size
        self.of: dict[int, Cut] = {}
        """By the `id` of a parameter."""
        for name, style in styles.items():
            self._check(name, modules.get(name), style)
            if is_library:
                self._check_ends(name, style)
        for name, param in params.items():
            if id(param) in self.of and not {name, parent_of(name)} & set(styles):
                raise ValueError(
                    f"{name} is tied to a parameter that the plan cuts; the plan must name {parent_of(name)}, too"
                )

    def _check(self, name: str, module: nn.Module | None, style: Style) -> None:
        """Check one module or parameter, and find where it is cut."""
        if style.kind == "parameter":
            ndim = self._params[name].ndim
            if not -ndim <= style.dim < ndim:
                raise ValueError(f"the plan cuts {name} along dimension {style.dim}, but it has {ndim} dimensions")
            self._cut(name, self._params[name], style.dim % ndim, style)
        elif module is None:
            pass  # a parameter that is not cut
        elif style.kind in ("loss", "gather"):
            self._check_logits(name, module, style)
        elif style.kind == "divide":
            for key in style.names:
                if not isinstance(number := getattr(module, key, None), int):
                    raise ValueError(f"{name}.{key} is {number!r}; 'divide' needs a whole number")
                if number % self._size:
                    raise ValueError(f"{self._size} ranks cannot share {name}.{key} = {number} equally")
        elif style.kind == "region":
            if not any(is_within(other, name) for other, kind in self._styles.items() if kind.kind == "parameter"):
                raise ValueError(f"{name} ({style.kind}) is a sum over ranks, but the plan cuts no parameter in it")
        elif style.kind in ("column", "row", "vocabulary"):
            self._check_layer(name, module, style)

    def _check_ends(self, name: str, style: Style) -> None:
        """ValueError if nothing takes what a rank computes with its part. A plan of a caller may leave this to other code."""
        if style.kind in ("column", "parameter") and not style.gathers and self._layout.region(parent_of(name)) is None:
            raise ValueError(
                f"the plan cuts {name}, but no row layer and no sum over ranks around it; pass plan= with a plan of your own"
            )

    def _check_layer(self, name: str, module: Any, style: Style) -> None:
        dims, is_embedding = features_of(module), isinstance(module, nn.Embedding)
        if dims is None or (style.kind == "vocabulary") > is_embedding or (is_embedding and style.kind == "row"):
            expected = "Embedding" if style.kind == "vocabulary" else "Linear"
            raise ValueError(
                f"the plan cuts {name} as {style.kind!r}, which needs {expected}; it is {type(module).__name__}"
            )
        if is_embedding and (module.max_norm is not None or module.scale_grad_by_freq or module.sparse):
            raise ValueError(
                f"{name} has max_norm, scale_grad_by_freq or sparse, which a cut embedding does not support"
            )
        if style.kind == "vocabulary":
            layers.vocabulary_class(module.__class__)
        elif style.kind == "row" and not has_own_product(module):
            raise ValueError(
                f"the plan cuts {name} as 'row'; the forward of its class {type(module).__name__} is not known"
            )
        of_input, of_output = dims
        self._cut(f"{name}.weight", module.weight, of_output if style.kind == "column" else of_input, style)
        bias = module._parameters.get("bias")
        if style.kind == "column" and bias is not None:
            self._cut(f"{name}.bias", bias, 0, style)

    def _check_logits(self, name: str, module: nn.Module, style: Style) -> None:
        if not style.names and len(self._layout.heads) != 1:
            raise ValueError(
                f"{name} ({style.kind}) needs one column layer outside of regions, whose outputs are the logits; the "
                f"plan has {len(self._layout.heads)}"
            )
        if style.kind == "loss" and (
            not (isinstance(module, nn.CrossEntropyLoss) or computes_loss(module))
            or getattr(module, "weight", None) is not None
        ):
            raise ValueError(f"{name} ({style.kind}) must be an nn.CrossEntropyLoss without weights of classes")

    def _cut(self, name: str, param: nn.Parameter, dim: int, style: Style) -> None:
        length, size = param.shape[dim], self._size
        blocks = style.blocks or length // style.parts
        if length % style.parts or (style.blocks is not None and (length // style.parts) % blocks):
            raise ValueError(
                f"{name} has {length} {_FEATURES.get(style.kind, 'elements')}, which are not {style.parts} x {blocks} "
                "equal blocks"
            )
        num_sharing = 1
        if style.blocks is not None and blocks % size:
            if style.is_shared and size % blocks == 0:
                num_sharing = size // blocks
            elif style.is_even or blocks < size:
                raise ValueError(
                    f"{size} ranks cannot share the {blocks} blocks (heads) of {name} equally; use a number of ranks that divides them"
                )
        found = Cut(dim, (length // style.parts,) * style.parts, style.blocks, num_sharing)
        if self.of.setdefault(id(param), found) != found:
            raise ValueError(f"{name} is tied to a parameter that the plan cuts in another way")


_FEATURES = {"column": "output features", "row": "input features", "vocabulary": "rows"}
