"""`tensor_parallel`: a plain model, cut over ranks by a plan, in place."""

import warnings
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from collectives import Communicator
from mpitrain.optim.optimizer_checks import watch_optimizers
from mpitrain.optim.torch_calls import watch_norms
from mpitrain.placement import parts
from mpitrain.placement.agreement import check_alike
from mpitrain.placement.marks import mark_cut, mark_replaced, spread_of
from mpitrain.placement.part_tensor import watch_state_dicts
from mpitrain.placement.parts import ParameterPart
from mpitrain.placement.stage_streams import SplitStream, mark_split, stream_of_stages
from mpitrain.tensor import hooks, layers, random
from mpitrain.tensor.cuts import Cuts
from mpitrain.tensor.errors import explain
from mpitrain.tensor.forgotten import NameForgotten
from mpitrain.tensor.inputs import CheckParts, check_inputs
from mpitrain.tensor.layers import features_of, has_own_product
from mpitrain.tensor.layout import TensorLayout
from mpitrain.tensor.plan import Plan, Style, parent_of, styles_of
from mpitrain.tensor.transformers.loss import cut_loss
from mpitrain.tensor.transformers.plans import plan_of_transformers
from mpitrain.torch_glue.heap import keep_freed_memory


def tensor_parallel(
    model: nn.Module, comm: Communicator, plan: Plan | None = None, *, sequence: bool = True
) -> nn.Module:
    """Cut a model over the ranks of `comm`, in place, before `pipeline` and `fully_shard`; returns the model. Collective.

    Every module stays in its place and keeps its name. Each rank keeps its part of the cut matrices, with the values of rank 0's model.
    Parameters on the meta device stay there until `fully_shard` or `initialize` gives them memory. Ranks of `comm` must pass the same
    inputs, and get the same outputs.

    Args:
        model: a whole model, the same on all ranks.
        comm: the ranks of a group that holds each layer together, such as `mesh["tp"]`.
        plan: names modules and how each is cut; None: the model's attribute `tensor_plan`, or the plan of a transformers model.
        sequence: also sequence parallelism: in each stack of blocks (an `nn.ModuleList` whose modules have cut matrices) the stream
            between the regions holds this rank's tokens alone, so each rank keeps 1/N of these activations. The number of tokens
            must be a multiple of the ranks.

    Raises ValueError on all ranks, with the model unchanged, for a plan that does not fit the model or the ranks.
    """
    if not isinstance(comm, Communicator) and hasattr(comm, "axes"):
        raise TypeError("tensor_parallel: expected a Communicator such as mesh['tp'], got the whole mesh")
    with comm.together("tensor_parallel"):
        cutter = _Cutter(model, comm, plan, sequence=sequence)
    check_alike(
        comm,
        cutter.described(),
        caller="tensor_parallel",
        remedy="build the same model on all ranks and cut it by the same plan",
    )
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
        if stream_of_stages(model) is not None:
            raise ValueError("the model is divided into stages already; call tensor_parallel before pipeline")
        if any(parts.part_of(param) is not None for param in model.parameters()):
            raise ValueError("the model is cut already")
        if any(spread_of(param) is not None for param in model.parameters()):
            raise ValueError("the model is sharded already; call tensor_parallel before fully_shard")
        self.is_library = plan is None and getattr(model, "tensor_plan", None) is None
        plan = _plan_of(model, comm.size) if plan is None else plan
        self.params = dict(model.named_parameters(remove_duplicate=False))
        self.styles = styles_of(self.modules, plan, self.params)
        self.layout = TensorLayout(self.modules, self.styles, sequence=sequence, completes=self.is_library)
        self.cuts = Cuts(self.modules, self.params, self.styles, self.layout, comm.size, is_library=self.is_library)
        self.lone_columns = self._lone_columns()
        if self.is_library and not self.layout.regions and comm.rank == 0:
            warnings.warn(
                f"transformers has no plan for the layers of {type(model).__name__}: tensor_parallel cuts its embedding and "
                "head alone; pass plan= to cut more",
                stacklevel=4,
            )
        self.heads_of_losses = {name for style in self.styles.values() if style.kind == "loss" for name in style.names}

    def described(self) -> list[str]:
        """One line for each parameter and style, which must be the same on all ranks."""
        return [
            *(
                f"parameter {name} of shape {tuple(param.shape)}, {param.dtype}, on {param.device.type}"
                for name, param in self.params.items()
            ),
            *(f"{style} for {name}" for name, style in self.styles.items()),
            f"sequence={bool(self.layout.stacks)}",
        ]

    def _lone_columns(self) -> set[str]:
        """The column layers that alone take the inputs of their regions."""
        columns: dict[str | None, list[str]] = {}
        styled = {name for name, style in self.styles.items() if style.kind == "row"}
        for name, style in self.styles.items():
            if style.kind in ("column", "parameter") and not isinstance(self.modules.get(name), nn.Embedding):
                columns.setdefault(self.layout.region(parent_of(name)), []).append(name)
        found = {names[0] for region, names in columns.items() if region is not None and len(names) == 1}
        for name, param in self.params.items():  # an uncut matrix may take them, too
            module = parent_of(name)
            if param.ndim > 1 and module not in styled | found and (region := self.layout.region(module)) is not None:
                found -= set(columns.get(region, []))
        return found

    def apply(self) -> None:
        """Change the model. Collective."""
        self.ranks = layers.TensorRanks(self.comm, sequence=bool(self.layout.stacks))
        counts = sorted({cut.num_sharing for cut in self.cuts.of.values()} - {1})
        sharing = {count: self.comm.split(self.comm.rank // count) for count in counts}
        made: dict[int, nn.Parameter] = {}
        for name, module in self.modules.items():
            for key, param in module._parameters.items():
                if param is not None:
                    module._parameters[key] = self._replaced(f"{name}.{key}" if name else key, param, made, sharing)
            watch_state_dicts(module)
        for name, style in self.styles.items():
            if name in self.modules:
                self._change(name, self.modules[name], style)
        self._change_once()
        for name in sorted(self.layout.wholes):
            self._before(name, partial(hooks.enter_whole, self.ranks))
            self.modules[name].register_forward_hook(partial(hooks.leave_whole, self.ranks))
        for name in (*sorted(self.layout.regions), *self.layout.heads):
            enters_all = name in self.styles and self.styles[name].kind == "region"
            is_cut = self.layout.is_cut(name)
            self._before(name, partial(hooks.enter_region, self.ranks, is_cut, enters_all))
            if name in self.layout.regions and not enters_all:
                hooks.check_once(self.modules[name], name, is_cut=is_cut)
                self.modules[name].register_forward_hook(partial(explain, name, is_cut), always_call=True)
        for path, stack in self.layout.stacks.items():
            self._before(stack[0], partial(hooks.split_stream, self.ranks, stack, self.is_library), prepend=True)
            for name in stack[1:]:
                self.modules[name].register_forward_pre_hook(
                    partial(hooks.check_split, self.ranks, stack, name), prepend=True
                )
            for name in stack:
                ends = partial(hooks.arrive, self.ranks, stack), partial(hooks.pass_on, self.ranks, stack)
                mark_split(self.modules[name], SplitStream(self.comm, *ends))
            self.modules[stack[-1]].register_forward_hook(partial(hooks.join_stream, self.ranks))
            self.modules[parent_of(path)].register_forward_hook(partial(hooks.check_joined, self.ranks, stack))
        if hasattr(self.modules[""], "resize_token_embeddings"):
            self.modules[""].resize_token_embeddings = _refuse_resize
        self._mark_inputs()
        lengths = {pair for name, param in self.params.items() for pair in self._lengths_of(name, param)}
        self.modules[""].register_forward_hook(NameForgotten(self.styles, lengths), always_call=True)
        self._before("", partial(check_inputs, self.ranks.exchange), prepend=True)
        self.modules[""].register_forward_pre_hook(CheckParts(self.params), prepend=True)
        blocks = {block for stack in self.layout.stacks.values() for block in stack}
        random.separate(
            self.ranks, self.modules, self.styles, regions=self.layout.regions, blocks=blocks, wholes=self.layout.wholes
        )

    def _lengths_of(self, name: str, param: nn.Parameter) -> list[tuple[int, int]]:
        """The length of a parameter along which it is cut, and that of this rank's part; of each of its matrices, too."""
        if (cut := self.cuts.of.get(id(param))) is None:
            return []
        part = _part(self.modules[parent_of(name)].get_parameter(name.rpartition(".")[2])).shape[cut.dim]
        lengths = {(param.shape[cut.dim], part), (cut.lengths[0], part // len(cut.lengths))}
        return [(length, of_part) for length, of_part in lengths if of_part < length]

    def _mark_inputs(self) -> None:
        """Mark the modules that get the same stream on all ranks."""
        regions = self.layout.regions
        for name, module in self.modules.items():
            holds_region = any(region.startswith(f"{name}." if name else "") for region in regions)
            if name in regions or (holds_region and not self.layout.is_cut(name)):
                parts.mark_input(module, self.comm)

    def _before(self, name: str, hook: Any, *, prepend: bool = False) -> None:
        self.modules[name].register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend)

    def _replaced(
        self, name: str, param: nn.Parameter, made: dict[int, nn.Parameter], sharing: dict[int, Communicator]
    ) -> nn.Parameter:
        """The parameter of this rank's part, with its mark. `made`: those that were made before, by the old one's `id`."""
        if id(param) not in made:
            if (cut := self.cuts.of.get(id(param))) is not None:
                copies = sharing.get(cut.num_sharing)
                part = parts.cut(param.shape, cut.dim, self.comm, lengths=cut.lengths, blocks=cut.blocks, copies=copies)
            else:
                part = parts.whole(param.shape, self.comm, is_partial=self._is_partial(name))
            new = _with_values(param, part, self.comm)
            mark_cut(new, name, part)
            mark_replaced(param, name, "tensor_parallel")
            made[id(param)] = made[id(new)] = new
        return made[id(param)]

    def _is_partial(self, name: str) -> bool:
        """Whether each rank computes a part of the gradient of a parameter that is not cut."""
        module = parent_of(name)
        if self.layout.region(module) is None or (module in self.styles and self.styles[module].kind == "row"):
            # Its input, or for the bias of a row layer the sum, is this rank's tokens.
            return self.layout.is_cut(module)
        return True

    def _change(self, name: str, module: nn.Module, style: Style) -> None:
        """Let one module compute with its part."""
        changed: Any = module
        if style.kind == "row":
            changed.__class__ = layers.cut_class(layers.RowLayer, type(module))  # type: ignore[arg-type]  # a class is hashable
            changed.ranks, changed.splits = self.ranks, style.splits
            changed.is_cut = self.layout.is_cut(self.layout.region(name) or "")
            changed.is_transposed = not isinstance(module, nn.Linear)
        elif style.kind == "vocabulary":
            changed.__class__ = layers.vocabulary_class(changed.__class__)
            changed.ranks, changed.first = self.ranks, _part(changed.weight).boxes[0].offset[0]
            changed.is_partial = self.layout.region(name) is not None
        elif style.kind == "region":
            changed.register_forward_hook(partial(hooks.leave_region, self.ranks, self.layout.is_cut(name)))
        elif style.kind == "once":
            changed.register_forward_hook(partial(hooks.once, self.ranks))
        elif style.kind == "loss":
            self._change_loss(changed, style)
        elif style.kind == "gather" or style.gathers:
            length = self._num_outputs(self._head(style) if style.kind == "gather" else name)
            is_partial = self.layout.region(name) is not None
            hook = partial(hooks.gather_output, self.ranks, length, is_partial)
            if name in self.heads_of_losses:
                hook = partial(hooks.gather_logits, self.ranks, length)
            changed.register_forward_hook(hook)
        if style.kind == "column" and has_own_product(module):
            changed.__class__ = layers.cut_class(layers.ColumnLayer, type(module))  # type: ignore[arg-type]
            changed.ranks, changed.is_alone = self.ranks, name in self.lone_columns
            changed.is_transposed = not isinstance(module, nn.Linear)
        elif style.kind == "divide":
            for key in style.names:
                setattr(changed, key, getattr(changed, key) // self.comm.size)
        of_input, of_output = features_of(module) or (0, 0)
        for key, dim in (("in_features", of_input), ("nx", of_input), ("out_features", of_output), ("nf", of_output)):
            if hasattr(changed, key):
                setattr(changed, key, changed.weight.shape[dim])
        self._regroup(name, changed, style)

    def _head(self, style: Style) -> str:
        """The layer whose outputs are the logits."""
        return style.names[0] if style.names else self.layout.heads[0]

    def _change_loss(self, changed: Any, style: Style) -> None:
        num_classes = self._num_outputs(self._head(style))
        if issubclass(type(changed), nn.CrossEntropyLoss):
            changed.__class__ = layers.VocabularyCrossEntropy
            changed.ranks, changed.num_classes = self.ranks, num_classes
        else:
            cut_loss(changed, self.ranks, num_classes)

    def _change_once(self) -> None:
        """Let modules compute with 1/N of parameters that count once in a sum over N ranks."""
        keys: dict[str, list[str]] = {}
        for name, style in self.styles.items():
            if style.kind == "once" and name not in self.modules:
                keys.setdefault(parent_of(name), []).append(name.rpartition(".")[2])
        for name, once in keys.items():
            changed = self.modules[name]
            changed.__class__ = layers.cut_class(layers.PartOnce, changed.__class__)
            changed.ranks, changed.once = self.ranks, tuple(once)

    def _regroup(self, name: str, module: nn.Module, style: Style) -> None:
        """If several ranks have one head of keys, a transformers attention repeats the head for fewer heads of queries."""
        owner: Any = self.modules[parent_of(name)]
        if not hasattr(owner, "num_key_value_groups") or hasattr(owner, "_key_value_groups"):
            return  # it counts its heads itself; or it is changed already
        if style.is_shared and (count := self.cuts_of(module)) > 1:
            owner._key_value_groups = owner.num_key_value_groups
            owner.num_key_value_groups //= count

    def cuts_of(self, module: Any) -> int:
        """How many ranks share each block of a module."""
        part = _part(module.weight)
        return 1 if part.copies is None else part.copies.size

    def _num_outputs(self, name: str) -> int:
        """The output features of a layer on all ranks together."""
        features = features_of(self.modules[name])
        assert features is not None
        return _part(self.modules[name].weight).full_shape[features[1]]


def _plan_of(model: nn.Module, size: int) -> Plan:
    plan = getattr(model, "tensor_plan", None)
    if plan is None:
        plan = plan_of_transformers(model, size)
    if plan is None:
        raise ValueError(
            f"{type(model).__name__} brings no plan along (an attribute tensor_plan); pass plan=, a dict of patterns "
            "of module names to mpitrain.tensor.Style"
        )
    return plan


def _refuse_resize(*args: Any, **kwargs: Any) -> NoReturn:
    """In the place of a method of transformers, which would make modules from this rank's rows."""
    raise TypeError("resize_token_embeddings: the model is cut over ranks; resize it before tensor_parallel")


def _part(param: Any) -> ParameterPart:
    part = parts.part_of(param)
    assert part is not None
    return part


@torch.no_grad()
def _with_values(param: nn.Parameter, part: ParameterPart, comm: Communicator) -> nn.Parameter:
    """A parameter with this rank's part of rank 0's values."""
    if param.is_meta:
        values = torch.empty(part.shape, dtype=param.dtype, device="meta")
    else:
        values = param.detach().contiguous()
        comm.broadcast(values)
        values = part.take(values).clone()
    return nn.Parameter(values, requires_grad=param.requires_grad)
