"""`tensor_parallel`: a plain model, cut over ranks by a plan, in place."""

from functools import partial
from typing import Any

import torch
from torch import nn

from collectives import Communicator
from mpitrain import parts
from mpitrain.heap import keep_freed_memory
from mpitrain.optim.optimizer_checks import watch_optimizers
from mpitrain.optim.spread import mark_cut, mark_replaced
from mpitrain.optim.torch_calls import watch_norms
from mpitrain.parts import Part
from mpitrain.tensor import layers, random
from mpitrain.tensor.plan import Plan, Style, region_of, styles_of
from mpitrain.tensor.transformers_plans import plan_of_transformers

_TOKENWISE = (
    nn.Linear, nn.Identity, nn.modules.dropout._DropoutNd, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softmax,
)  # fmt: skip
"""Classes of modules that compute each token by itself. So do those whose name ends with "Norm"."""


def tensor_parallel(
    model: nn.Module, comm: Communicator, plan: Plan | None = None, *, sequence: bool = True
) -> nn.Module:
    """Cut a model over the ranks of `comm`, in place, before `fully_shard`; returns the model. Collective.

    Every module stays in its place and keeps its name. Each rank keeps its part of the cut matrices, with the values of rank 0's model.
    Parameters on the meta device stay there until `fully_shard` or `initialize` gives them memory. Ranks of `comm` must pass the same
    inputs, and get the same outputs.

    Args: plan: names modules and how each is cut; None: the model's attribute `tensor_plan`, or the plan of a transformers model.
    sequence: also sequence parallelism: in each stack of blocks (an `nn.ModuleList` whose modules have cut matrices) the stream between
    the regions holds this rank's tokens alone, so each rank keeps 1/N of these activations. The number of tokens must be a multiple of
    the ranks.

    Raises ValueError on all ranks, with the model unchanged, for a plan that does not fit the model or the ranks.
    """
    with comm.together("tensor_parallel"):
        cutter = _Cutter(model, comm, plan, sequence=sequence)
    if any(param.device.type in ("cpu", "meta") for param in model.parameters()):
        keep_freed_memory()
    if comm.size > 1:
        watch_optimizers()
        watch_norms()
        cutter.apply()
    return model


class _Cutter:
    """One call of `tensor_parallel`: first all checks, then all changes."""

    def __init__(self, model: nn.Module, comm: Communicator, plan: Plan | None, *, sequence: bool) -> None:
        self.modules: dict[str, Any] = dict(model.named_modules())
        self.comm = comm
        if any(parts.part_of(param) is not None for param in model.parameters()):
            raise ValueError("the model is cut already")
        self.styles = styles_of(self.modules, _plan_of(model) if plan is None else plan)
        self.regions = {region_of(name) for name, style in self.styles.items() if style.kind in ("row", "experts")}
        """The names of modules whose outputs are sums over the ranks."""
        for region in self.regions:
            if (outer := self._region(region)) is not None:
                raise ValueError(
                    f"{region or 'the model'} is within {outer or 'the model'}, and both end with a sum over ranks"
                )
        self.heads = [
            name for name, style in self.styles.items() if style.kind == "column" and self._region(name) is None
        ]
        """Column layers outside of regions: their outputs stay cut."""
        self.only_columns = self._only_columns()
        self.stacks = self._stacks() if sequence else {}
        self.ranks = layers.TensorRanks(comm, sequence=bool(self.stacks))
        self.cuts: dict[int, tuple[int, list[int], int | None, int]] = {}
        """By the `id` of a cut parameter: the dimension, the lengths of its matrices, their blocks, and how many ranks share a part."""
        for name, style in self.styles.items():
            self._check(name, self.modules[name], style)
        if sequence:
            self._check_tokenwise()

    def _region(self, name: str) -> str | None:
        """The innermost region around a module."""
        while name:
            name = region_of(name)
            if name in self.regions:
                return name
        return None

    def _only_columns(self) -> set[str]:
        """The column layers that are the only ones of their regions."""
        columns: dict[str | None, list[str]] = {}
        for name, style in self.styles.items():
            if style.kind == "column" and not isinstance(self.modules[name], nn.Embedding):
                columns.setdefault(self._region(name), []).append(name)
        return {names[0] for region, names in columns.items() if region is not None and len(names) == 1}

    def _stacks(self) -> dict[str, list[str]]:
        """The outermost lists of blocks around regions, each with the names of its blocks."""
        stacks: dict[str, list[str]] = {}
        for region in sorted(self.regions):
            names = region.split(".") if region else []
            for end in range(1, len(names)):
                path = ".".join(names[:end])
                if isinstance(self.modules[path], nn.ModuleList):
                    stacks[path] = [f"{path}.{key}" for key, _ in self.modules[path].named_children()]
                    break
        for path, blocks in stacks.items():
            for block in blocks:
                if not any(region == block or region.startswith(block + ".") for region in self.regions):
                    raise ValueError(
                        f"the plan cuts nothing in {block}, but in other blocks of {path}; cut each, or pass "
                        "sequence=False"
                    )
        return stacks

    def _is_in_stack(self, name: str) -> bool:
        return any(name.startswith(path + ".") for path in self.stacks)

    # Checks

    def _check(self, name: str, module: nn.Module, style: Style) -> None:
        """Check one module, and find where its parameters are cut."""
        if style.kind in ("loss", "gather"):
            self._check_logits(name, module, style)
        elif style.kind == "divide":
            for key in style.names:
                if (number := getattr(module, key)) % self.comm.size:
                    raise ValueError(f"{self.comm.size} ranks cannot share {name}.{key} = {number} equally")
        elif style.kind == "experts":
            *columns, row = style.names
            for key in columns:
                self._cut(f"{name}.{key}", getattr(module, key), 1, style)
            self._cut(f"{name}.{row}", getattr(module, row), 2, Style("row"))
        else:
            dims = _features_of(module)
            if dims is None or (style.kind == "vocabulary") > isinstance(module, nn.Embedding) or (
                isinstance(module, nn.Embedding) and style.kind == "row"
            ):  # fmt: skip
                expected = "Embedding" if style.kind == "vocabulary" else "Linear"
                raise ValueError(
                    f"the plan cuts {name} as {style.kind!r}, which needs {expected}; it is {type(module).__name__}"
                )
            if isinstance(module, nn.Embedding) and (
                module.max_norm is not None or module.scale_grad_by_freq or module.sparse
            ):
                raise ValueError(
                    f"{name} has max_norm, scale_grad_by_freq or sparse, which a cut embedding does not support"
                )
            of_input, of_output = dims
            dim = of_output if style.kind == "column" else of_input
            self._cut(f"{name}.weight", module.get_parameter("weight"), dim, style)
            bias = module._parameters.get("bias")
            if style.kind == "column" and bias is not None:
                self._cut(f"{name}.bias", bias, 0, style)

    def _check_logits(self, name: str, module: nn.Module, style: Style) -> None:
        if len(self.heads) != 1:
            raise ValueError(
                f"{name} ({style.kind}) needs one column layer outside of regions, whose outputs are the logits; the "
                f"plan has {len(self.heads)}"
            )
        if style.kind == "loss" and (not isinstance(module, nn.CrossEntropyLoss) or module.weight is not None):
            raise ValueError(f"{name} ({style.kind}) must be an nn.CrossEntropyLoss without weights of classes")

    def _cut(self, name: str, param: nn.Parameter, dim: int, style: Style) -> None:
        length, size = param.shape[dim], self.comm.size
        blocks = style.blocks or length // style.parts
        if length % style.parts or (style.blocks is not None and (length // style.parts) % blocks):
            raise ValueError(
                f"{name} has {length} {'output' if style.kind == 'column' else 'input'} features, which are not "
                f"{style.parts} x {blocks} equal blocks"
            )
        num_sharing = 1
        if style.blocks is not None and blocks % size:
            if style.is_shared and size % blocks == 0:
                num_sharing = size // blocks
            elif style.is_even or blocks < size:
                raise ValueError(f"{size} ranks cannot share the {blocks} blocks (heads) of {name} equally")
        found = dim, [length // style.parts] * style.parts, style.blocks, num_sharing
        if self.cuts.setdefault(id(param), found) != found:
            raise ValueError(f"{name} is tied to a parameter that the plan cuts in another way")

    def _check_tokenwise(self) -> None:
        """ValueError if a module between the regions of a stack mixes tokens, as far as its class tells."""
        for name, module in self.modules.items():
            is_leaf = next(module.children(), None) is None
            if not is_leaf or not self._is_in_stack(name) or name in self.regions or self._region(name) is not None:
                continue
            if not (isinstance(module, _TOKENWISE) or type(module).__name__.endswith("Norm") or name in self.styles):
                raise ValueError(
                    f"{name} ({type(module).__name__}) is in a stack whose tokens are cut, and may mix tokens; cut "
                    "its matrices by the plan, or pass sequence=False"
                )

    # Changes

    def apply(self) -> None:
        """Change the model. Collective."""
        counts = sorted({num_sharing for *_, num_sharing in self.cuts.values()} - {1})
        sharing = {count: self.comm.split(self.comm.rank // count) for count in counts}
        made: dict[int, nn.Parameter] = {}
        for name, module in self.modules.items():
            for key, param in module._parameters.items():
                if param is not None:
                    module._parameters[key] = self._replaced(f"{name}.{key}" if name else key, param, made, sharing)
        for name, style in self.styles.items():
            self._change(name, self.modules[name], style)
        for stack in self.stacks.values():
            self.modules[stack[0]].register_forward_pre_hook(partial(layers.split_stream, self.ranks), with_kwargs=True)
            self.modules[stack[-1]].register_forward_hook(partial(layers.join_stream, self.ranks))
        for name in (*sorted(self.regions), *self.heads):  # a region may be the first block of a stack
            hook = partial(layers.enter_region, self.ranks, self._is_in_stack(name))
            self.modules[name].register_forward_pre_hook(hook, with_kwargs=True)
        for name, module in self.modules.items():
            holds_region = any(region.startswith(f"{name}." if name else "") for region in self.regions)
            if name in self.regions or (holds_region and not self._is_in_stack(name)):
                parts.mark_input(module, self.comm)
        blocks = {block for stack in self.stacks.values() for block in stack}
        random.separate(self.ranks, self.modules, self.styles, regions=self.regions, blocks=blocks)

    def _replaced(
        self, name: str, param: nn.Parameter, made: dict[int, nn.Parameter], sharing: dict[int, Communicator]
    ) -> nn.Parameter:
        """The parameter of this rank's part, with its mark. `made`: those that were made before, by the old one's `id`."""
        if id(param) not in made:
            if id(param) in self.cuts:
                dim, lengths, blocks, num_sharing = self.cuts[id(param)]
                copies = sharing.get(num_sharing)
                part = parts.cut(param.shape, dim, self.comm, lengths=lengths, blocks=blocks, copies=copies)
            else:
                part = parts.whole(param.shape, self.comm, is_partial=self._is_partial(name))
            new = _with_values(param, part, self.comm)
            mark_cut(new, part)
            mark_replaced(param, name, "tensor_parallel")
            made[id(param)] = made[id(new)] = new
        return made[id(param)]

    def _is_partial(self, name: str) -> bool:
        """Whether each rank computes a part of the gradient of a parameter that is not cut."""
        module = region_of(name)
        is_inside = module in self.regions or self._region(module) is not None
        if not is_inside or (module in self.styles and self.styles[module].kind == "row"):
            return self._is_in_stack(name)  # its input, or for the bias of a row layer the sum, is this rank's tokens
        return True

    def _change(self, name: str, module: nn.Module, style: Style) -> None:
        """Let one module compute with its part."""
        changed: Any = module
        if style.kind == "row":
            changed.__class__ = layers.cut_class(layers.RowLayer, type(module))  # type: ignore[arg-type]  # a class is hashable
            changed.ranks, changed.is_cut, changed.splits = self.ranks, self._is_in_stack(name), style.splits
            changed.is_transposed = not isinstance(module, nn.Linear)
        elif name in self.only_columns:
            changed.__class__ = layers.cut_class(layers.ColumnLayer, type(module))  # type: ignore[arg-type]
            changed.ranks, changed.is_transposed = self.ranks, not isinstance(module, nn.Linear)
        elif style.kind == "vocabulary":
            changed.__class__ = layers.VocabularyEmbedding
            changed.ranks, changed.first = self.ranks, _part(changed.weight).boxes[0].offset[0]
        elif style.kind == "experts":
            region = region_of(name)
            hook = partial(layers.leave_region, self.ranks, self._is_in_stack(region))
            self.modules[region].register_forward_hook(hook)
        elif style.kind == "loss":
            changed.__class__ = layers.VocabularyCrossEntropy
            changed.ranks, changed.num_classes = self.ranks, self._num_outputs(self.heads[0])
        elif style.kind == "gather" or style.gathers:
            length = self._num_outputs(self.heads[0] if style.kind == "gather" else name)
            hook = partial(layers.gather_output, self.ranks, length, self._region(name) is not None)
            changed.register_forward_hook(hook)
        if style.kind == "divide":
            for key in style.names:
                setattr(changed, key, getattr(changed, key) // self.comm.size)
        of_input, of_output = _features_of(module) or (0, 0)
        for key, dim in (("in_features", of_input), ("nx", of_input), ("out_features", of_output), ("nf", of_output)):
            if hasattr(changed, key):
                setattr(changed, key, changed.weight.shape[dim])
        self._regroup(name, changed, style)

    def _regroup(self, name: str, module: nn.Module, style: Style) -> None:
        """If several ranks have one head of keys, a transformers attention repeats the head for fewer heads of queries."""
        owner: Any = self.modules[region_of(name)]
        if not hasattr(owner, "num_key_value_groups") or hasattr(owner, "_key_value_groups"):
            return  # it counts its heads itself; or it is changed already
        if style.is_shared and (count := self.cuts_of(module)) > 1:
            owner._key_value_groups = owner.num_key_value_groups
            owner.num_key_value_groups //= count

    def cuts_of(self, module: nn.Module) -> int:
        """How many ranks share each block of a module."""
        part = _part(module.weight)
        return 1 if part.copies is None else part.copies.size

    def _num_outputs(self, name: str) -> int:
        """The output features of a layer on all ranks together."""
        features = _features_of(self.modules[name])
        assert features is not None
        return _part(self.modules[name].weight).full_shape[features[1]]


def _plan_of(model: nn.Module) -> Plan:
    plan = getattr(model, "tensor_plan", None)
    if plan is None:
        plan = plan_of_transformers(model)
    if plan is None:
        raise ValueError(
            f"{type(model).__name__} brings no plan along (an attribute tensor_plan); pass plan=, a dict of patterns "
            "of module names to mpitrain.tensor.Style"
        )
    return plan


def _features_of(module: nn.Module) -> tuple[int, int] | None:
    """The dimensions of the weight that are input and output features; None for a module without them."""
    if isinstance(module, nn.Linear):
        return 1, 0
    if isinstance(module, nn.Embedding) or type(module).__name__ in ("Conv1D", "RowConv1D", "ColumnConv1D"):
        return 0, 1
    return None


def _part(param: Any) -> Part:
    part = parts.part_of(param)
    assert part is not None
    return part


@torch.no_grad()
def _with_values(param: nn.Parameter, part: Part, comm: Communicator) -> nn.Parameter:
    """A parameter with this rank's part of rank 0's values."""
    if param.is_meta:
        values = torch.empty(part.shape, dtype=param.dtype, device="meta")
    else:
        values = param.detach().contiguous()
        comm.broadcast(values)
        values = part.take(values).clone()
    return nn.Parameter(values, requires_grad=param.requires_grad)
