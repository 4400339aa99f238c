"""`python -m mpitrain memory --np N [--nodes M] [--json] [settings]`."""

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from collectives import is_live_terminal
from mpitrain.config import ConfigError, parse
from mpitrain.memory.prediction import KINDS, Prediction, predict


def main(argv: Sequence[str]) -> None:
    """Print what a run with these settings would hold. ConfigError, ValueError for wrong arguments."""
    words = list(argv)
    num_ranks, num_nodes = _take(words, "--np"), _take(words, "--nodes") or 1
    as_json = "--json" in words
    if as_json:
        words.remove("--json")
    config = parse(words)
    if num_ranks is None:
        raise ConfigError("memory: --np N, the number of ranks, is missing")
    prediction = predict(config, num_ranks, num_nodes)
    if as_json:
        print(json.dumps(prediction.to_dict(), indent=1))
    else:
        _show(prediction)


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


def _show(prediction: Prediction) -> None:
    ranks, nodes = prediction.num_ranks, prediction.num_nodes
    table = Table(
        title=f"{prediction.num_parameters / 1e6:.1f} M parameters, {prediction.storage}, {ranks} rank{'s' * (ranks > 1)} "
        f"on {nodes} node{'s' * (nodes > 1)}",
        caption=f"most at any moment of a step; {prediction.shared / 1e6:,.0f} MB of a node are in its /dev/shm",
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
