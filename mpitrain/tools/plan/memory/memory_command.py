"""`python -m mpitrain memory --np N [--nodes M] [--json] [settings]`: see USAGE."""

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from collectives import is_live_terminal
from mpitrain.job.config import Config, ConfigError, TrainConfig, parse
from mpitrain.tools.plan.memory.prediction import KINDS, Prediction, predict

USAGE = """usage: python -m mpitrain memory --np N [--nodes M] [--json] [settings]

Predicts the peak memory of a run with these settings, on each rank and each node, by kind. One process computes it without a run.

  --np N      number of ranks
  --nodes M   number of nodes; each has the same number of ranks (default: 1)
  --json      print the figures, in bytes, as JSON

The settings are those of a training run. Without train.batch the default global batch is rounded up to a multiple of the ranks.
"""


def main(argv: Sequence[str]) -> None:
    """Print the memory of a run with these settings. ConfigError or ValueError for wrong arguments."""
    words = list(argv)
    if {"-h", "--help"} & set(words):
        print(USAGE)
        parse(words)  # prints all settings and exits
    num_ranks, num_nodes = _take(words, "--np"), _take(words, "--nodes") or 1
    as_json = "--json" in words
    if as_json:
        words.remove("--json")
    config = parse(words)
    if num_ranks is None:
        raise ConfigError("memory: --np N, the number of ranks, is missing")
    batch = config.train.batch
    if batch % (factor := config.train.slices or num_ranks * config.train.accumulate):
        # Only the default is rounded: a batch in the user's settings that does not fit is an error.
        config = parse(words, Config(train=TrainConfig(batch=-(-batch // factor) * factor)))
    prediction = predict(config, num_ranks, num_nodes)
    if as_json:
        print(json.dumps(prediction.to_dict() | {"batch": config.train.batch}, indent=1))
    else:
        _show(prediction, config.train.batch, was_rounded=config.train.batch != batch)


def _take(words: list[str], flag: str) -> int | None:
    """Remove a flag and its number from the words; None if it is not there."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == flag:
            given = [value] if equals else words[at + 1 : at + 2]
            if not given or not given[0].isdecimal() or int(given[0]) < 1:
                raise ConfigError(
                    f"memory: {flag}: expected a whole number of at least 1, got {given[0] if given else 'nothing'}"
                )
            del words[at : at + (1 if equals else 2)]
            return int(given[0])
    return None


def _show(prediction: Prediction, batch: int, *, was_rounded: bool) -> None:
    ranks, nodes = prediction.num_ranks, prediction.num_nodes
    table = Table(
        title=f"{prediction.num_parameters / 1e6:.1f} M parameters, {prediction.storage}, {ranks} rank{'s' * (ranks > 1)} "
        f"on {nodes} node{'s' * (nodes > 1)}",
        caption=f"most at any moment of a step of {batch} sequences"
        + (", rounded up from the default" if was_rounded else "")
        + f"; {prediction.shared / 1e6:,.0f} MB of a node are in its /dev/shm",
    )
    table.add_column("", no_wrap=True)
    for heading in ("a rank", "a node"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", style="dim")
    for kind, what in KINDS.items():
        table.add_row(kind, _mb(prediction.rank[kind]), _mb(prediction.node[kind]), what)
    table.add_section()
    table.add_row("all", _mb(sum(prediction.rank.values())), _mb(sum(prediction.node.values())), "")
    live = is_live_terminal()
    Console(width=None if live else 110, force_terminal=live).print(table)


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"
