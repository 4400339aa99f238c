"""What a sharded model is made of, unit by unit."""

from io import StringIO

from rich.console import Console
from rich.table import Table
from torch import nn

from collectives.bench.units import show_bytes
from mpitrain.sharding.module import ShardedModule, sharded_params
from mpitrain.sharding.unit.marks import box_of


def num_parameters(model: nn.Module, *, trained_only: bool = False) -> int:
    """Elements of all parameters of the whole model, sharded or not; tied ones once. `trained_only`: those that require gradients."""
    sharded = {id(param.shard): param.full.numel() for param in sharded_params(model)}
    return sum(
        sharded.get(id(param), param.numel()) for param in model.parameters() if param.requires_grad or not trained_only
    )


def summary(model: nn.Module) -> str:
    """A table of a sharded model: for each unit its parameters, this rank's part of them, where the full ones live, and dtypes."""
    kind = type(model).__mro__[2 if isinstance(model, ShardedModule) else 0]  # the model's own
    table = Table(title=f"{kind.__name__}: {num_parameters(model):,} parameters")
    for heading, justify in (
        ("unit", "left"), ("parameters", "right"), ("this rank's", "right"), ("bytes", "right"), ("full", "left"),
        ("masters", "left"), ("compute", "left"), ("reduced in", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for name, module in model.named_modules():
        for flat in module._unit.flats if isinstance(module, ShardedModule) else ():
            dtypes = [str(dtype).removeprefix("torch.") for dtype in (flat.dtype, flat.full_dtype, flat.reduce_dtype)]
            if not flat.trained:
                dtypes[2] = "frozen"
            mine = sum(param.shard.numel() for param in flat.params)
            whole = sum(param.full.numel() for param in flat.params)
            table.add_row(
                name or "(root)",
                f"{whole:,}",
                f"{mine:,}",
                show_bytes(mine * flat.dtype.itemsize),
                flat.storage.kind,
                *dtypes,
            )
    others = [param for param in model.parameters() if box_of(param) is None]
    if others:
        count = sum(param.numel() for param in others)
        nbytes = sum(param.numel() * param.itemsize for param in others)
        table.add_row("not sharded", f"{count:,}", f"{count:,}", show_bytes(nbytes), "on each rank", "", "", "")
    text = StringIO()
    Console(file=text, width=140).print(table)
    return text.getvalue()
