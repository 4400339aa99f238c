"""The units of a sharded model as a table."""

from io import StringIO
from math import prod

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from collectives.texts import show_bytes
from mpitrain.placement.marks import box_of
from mpitrain.placement.parts import part_of
from mpitrain.sharding.unit.unit import kind_of, params_by_shard, unit_of


def num_parameters(model: nn.Module, *, trained_only: bool = False) -> int:
    """Elements of all parameters of the model, sharded or not; tied ones count once. `trained_only`: those that require gradients."""
    sharded = params_by_shard(model)
    counted = [param for param in model.parameters() if param.requires_grad or not trained_only]
    return sum(_numel(sharded[param].full if param in sharded else param) for param in counted)


def _numel(param: nn.Parameter) -> int:
    """Elements of the whole parameter, of which this one may be a part."""
    part = part_of(param)
    return param.numel() if part is None else prod(part.full_shape)


def summary(model: nn.Module) -> str:
    """A table of a sharded model: for each unit the parameters, this rank's part, the storage of full parameters, and the dtypes."""
    table = Table(title=f"{kind_of(model).__name__}: {num_parameters(model):,} parameters")
    for heading, justify in (
        ("unit", "left"), ("parameters", "right"), ("this rank's", "right"), ("bytes", "right"), ("full", "left"),
        ("masters", "left"), ("compute", "left"), ("reduced in", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for name, module in model.named_modules():
        unit = unit_of(module)
        for flat in () if unit is None else unit.flats:
            mine = sum(param.shard.numel() for param in flat.params)
            whole = sum(param.full.numel() for param in flat.params)
            nbytes = show_bytes(mine * flat.dtype.itemsize)
            reduced_in = _short(flat.reduce_dtype) if flat.gradients else "frozen"
            dtypes = _short(flat.dtype), _short(flat.full_dtype), reduced_in
            table.add_row(name or "(root)", f"{whole:,}", f"{mine:,}", nbytes, flat.storage.kind, *dtypes)
    others = [param for param in model.parameters() if box_of(param) is None]
    if others:
        count = f"{sum(param.numel() for param in others):,}"
        nbytes = show_bytes(sum(param.nbytes for param in others))
        table.add_row("not sharded", count, count, nbytes, "on each rank", "", "", "")
    text = StringIO()
    Console(file=text, width=140).print(table)
    return text.getvalue()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
