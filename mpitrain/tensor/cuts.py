"""Where the parameters of a model are cut, and whether the plan fits the model and the number of ranks."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from mpitrain.placement.parts import bounds
from mpitrain.tensor import layers
from mpitrain.tensor.layers import features_of, has_own_product
from mpitrain.tensor.layout import TensorLayout
from mpitrain.tensor.plan import Style, is_within, parent_of
from mpitrain.tensor.transformers.loss import computes_loss


class ParameterCut(NamedTuple):
    """How a parameter is cut: along dimension `dim`, where matrices of `lengths` lie end to end; see `parts.cut`."""

    dim: int
    lengths: tuple[int, ...]
    blocks: int | None
    num_sharing: int
    """How many ranks have the same part."""

    def bounds(self, size: int) -> list[int]:
        """Where the parts of each matrix begin, and the end."""
        return bounds(self.lengths[0], size // self.num_sharing, self.blocks)

    def is_in_order(self, size: int) -> bool:
        """Whether the parts of `size` ranks, end to end, are the whole, and as equal as those of an array of the same length."""
        return len(self.lengths) == 1 and self.bounds(size) == bounds(self.lengths[0], size)


class Cuts:
    """The cuts of a plan over `size` ranks. ValueError for a style that does not fit its module, or the ranks.

    `is_library`: the plan is the library's, so the outputs of each layer that is cut must be gathered or added up.
    """

    def __init__(
        self,
        modules: Mapping[str, Any],
        params: Mapping[str, nn.Parameter],
        styles: Mapping[str, Style],
        layout: TensorLayout,
        size: int,
        *,
        is_library: bool,
    ) -> None:
        self._modules, self._params, self._styles, self._layout, self._size = modules, params, styles, layout, size
        self.of: dict[int, ParameterCut] = {}
        """By the `id` of a parameter."""
        for name, style in styles.items():
            self._check(name, modules.get(name), style)
            if is_library:
                self._check_ends(name, style)
        for name, style in styles.items():
            if style.kind in ("loss", "gather"):
                self._check_logits(name, modules[name], style)
        for region in layout.regions:
            self._check_region(region, tells_all=is_library)
        for name, param in params.items():
            if id(param) in self.of and not {name, parent_of(name)} & set(styles):
                if parent_of(name) not in modules:
                    raise ValueError(
                        f"{parent_of(name)} is a module that the model has under another name, too; a shared module cannot be cut, so "
                        "give each place its own module, or leave the module out of the plan"
                    )
                raise ValueError(
                    f"{name} is tied to a parameter that the plan cuts; the plan must name {parent_of(name)}, too"
                )

    def _check(self, name: str, module: nn.Module | None, style: Style) -> None:
        """Check one module or parameter, and find where it is cut."""
        owner = self._modules.get(parent_of(name))
        if style.kind in ("column", "row", "parameter") and isinstance(owner, _READERS):
            raise ValueError(
                f"the plan cuts {name}, but {type(owner).__name__} of torch computes with all of this weight itself, so the ranks' "
                "parts would not be added up; leave it out of the plan, or write the module with an nn.Linear for each matrix (see "
                "docs/parallel.md)"
            )
        if style.kind == "parameter":
            ndim = self._params[name].ndim
            if not -ndim <= style.dim < ndim:
                raise ValueError(f"the plan cuts {name} along dimension {style.dim}, but it has {ndim} dimensions")
            self._cut(name, self._params[name], style.dim % ndim, style)
        elif module is None:
            pass  # a parameter that is not cut
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
        if f"{name}.weight" not in self._params:
            raise ValueError(
                f"the plan cuts {name}, whose weight is not a parameter but computed from others, as by a weight norm; leave it out "
                "of the plan, or make the weight a parameter again"
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
        if style.gathers or style.splits or style.kind == "vocabulary":
            self._check_order(name)
        bias = module._parameters.get("bias")
        if style.kind == "column" and bias is not None:
            self._cut(f"{name}.bias", bias, 0, style)

    def _check_logits(self, name: str, module: nn.Module, style: Style) -> None:
        heads = style.names or tuple(self._layout.heads)
        if len(heads) != 1 or heads[0] not in self._layout.heads:
            raise ValueError(
                f"{name} ({style.kind}) needs one column layer outside of regions, whose outputs are the logits; the "
                f"plan has {', '.join(heads) or 'none'}"
            )
        is_loss = isinstance(module, nn.CrossEntropyLoss)
        if style.kind == "loss" and (
            not (is_loss or computes_loss(module)) or getattr(module, "weight", None) is not None
        ):
            found = "one with weights" if is_loss else f"a {type(module).__name__}"
            raise ValueError(
                f"{name} ({style.kind}) must be an nn.CrossEntropyLoss without weights of classes, and is {found}; "
                f"leave it out of the plan, and give {heads[0]} Style('column', gathers=True), which gathers the logits for it"
            )
        head = heads[0]
        self._check_order(head)
        around = (other for other, kind in self._styles.items() if kind.kind == "gather" and is_within(head, other))
        gathering = head if self._styles[head].gathers else next(around, None)
        if gathering not in (None, name) and (is_loss or style.kind == "gather"):
            raise ValueError(
                f"{name} ({style.kind}) takes this rank's part of the logits of {head}, but {gathering} gathers them by the plan; "
                "gather them in a module that the loss does not use, or leave one of the two out of the plan"
            )

    def _check_order(self, name: str) -> None:
        """ValueError if the ranks' features of a layer, end to end, are not those of the plain layer."""
        if not self.of[id(self._modules[name].weight)].is_in_order(self._size):
            style = self._styles[name]
            raise ValueError(
                f"{name} is gathered, split or looked up in the order of the {self._size} ranks: expected parts=1 and no blocks, or "
                f"blocks that the ranks share equally, got parts={style.parts} and blocks={style.blocks}"
            )

    def _check_region(self, region: str, *, tells_all: bool) -> None:
        """ValueError if ranks would multiply features by rows of the region's row layer that belong to other features.

        `tells_all`: whether a plan without `parts` and `blocks` says that there are none.
        """
        rows = self._cuts_in(region, "row")
        if len({(row.lengths, tuple(row.bounds(self._size))) for row in rows.values()}) != 1:
            return  # by their own sum each, of different features
        (row_name, row), columns = next(iter(rows.items())), self._cuts_in(region, "column")
        for name, column in columns.items():
            self._check_pair(name, column, row_name, row)
            if not tells_all and sum(column.lengths) > sum(row.lengths):
                self._check_told(
                    name, f"{sum(column.lengths)} output features, more than {row_name} takes ({sum(row.lengths)})"
                )
        most = max((sum(column.lengths) for column in columns.values()), default=sum(row.lengths))
        has_others = any(
            style.kind == "parameter" and self._layout.region(parent_of(name)) == region
            for name, style in self._styles.items()
        )
        if not tells_all and not has_others and sum(row.lengths) > most:
            self._check_told(
                row_name, f"{sum(row.lengths)} input features, more than each column layer of its region has ({most})"
            )

    def _cuts_in(self, region: str, kind: str) -> dict[str, ParameterCut]:
        """The cuts of a region's layers of a `kind`, without those that gather their outputs or take whole inputs."""
        return {
            name: self.of[id(self._modules[name].weight)]
            for name, style in self._styles.items()
            if style.kind == kind and not style.gathers and not style.splits and self._layout.region(name) == region
        }

    def _check_pair(self, name: str, column: ParameterCut, row_name: str, row: ParameterCut) -> None:
        is_alike = column.bounds(self._size) == row.bounds(self._size)
        same_matrix, same_sum = column.lengths[0] == row.lengths[0], sum(column.lengths) == sum(row.lengths)
        # With heads a joint matrix of keys and values may be as long as the queries.
        is_confused = same_sum and not same_matrix and column.blocks is None
        if (same_matrix and not is_alike) or is_confused:
            raise ValueError(
                f"the plan cuts the output features of {name} in another way than the input features of {row_name} in the same region: "
                f"{_described(column, self._size)} and {_described(row, self._size)}; give both the same parts and blocks"
            )

    def _check_told(self, name: str, what: str) -> None:
        """ValueError if the plan does not tell how several matrices lie in one weight."""
        style = self._styles[name]
        if style.parts == 1 and style.blocks is None:
            raise ValueError(
                f"{name} has {what}, so its weight seems to contain several matrices; pass Style({style.kind!r}, parts=K) if "
                f"K matrices lie end to end, such as query, key and value, or Style({style.kind!r}, blocks=N) if each of N blocks, "
                "such as heads, has its own rows of all matrices"
            )

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
            if style.is_shared and style.kind in ("column", "parameter") and size % blocks == 0:
                num_sharing = size // blocks
            elif style.is_even or blocks < size:
                raise ValueError(
                    f"{size} ranks cannot share the {blocks} blocks (heads) of {name} equally; use a number of ranks that divides them"
                )
        found = ParameterCut(dim, (length // style.parts,) * style.parts, style.blocks, num_sharing)
        if self.of.setdefault(id(param), found) != found:
            raise ValueError(f"{name} is tied to a parameter that the plan cuts in another way")


def _described(cut: ParameterCut, size: int) -> str:
    """Such as "2 x 12 features, whose parts begin at 0, 6"."""
    begins = ", ".join(map(str, cut.bounds(size)[:-1]))
    return f"{len(cut.lengths)} x {cut.lengths[0]} features, whose parts begin at {begins}"


_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.RNNBase)
"""Modules of torch that compute with weights, also those of their layers, without calling a layer."""

_FEATURES = {"column": "output features", "row": "input features", "vocabulary": "rows"}
