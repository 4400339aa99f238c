"""The sinks of `log.sinks`."""

from collections.abc import Sequence
from importlib.util import find_spec

from mpitrain.job.config import ConfigError
from mpitrain.job.record.sinks.csv_file import CsvFile
from mpitrain.job.record.sinks.outside import Outside
from mpitrain.job.record.sinks.sink import Sink
from mpitrain.job.record.sinks.tensorboard import TensorBoard

_OWN: dict[str, type[Sink]] = {"csv": CsvFile, "tensorboard": TensorBoard}
"""Those that need no package."""


def check_sinks(names: Sequence[str]) -> None:
    """ConfigError if the package of a sink is not installed."""
    for name in names:
        # A folder such as ./wandb, which W&B makes, counts as a package without origin.
        if name not in _OWN and ((package := find_spec(name)) is None or package.origin is None):
            raise ConfigError(f'log.sinks: {name} is not installed here; expected pip install "mpitrain[{name}]"')


def make_sinks(names: Sequence[str]) -> list[Sink]:
    """The sinks, in this order. They touch neither files nor other tools before `open`."""
    return [_OWN[name]() if name in _OWN else Outside(name) for name in names]
