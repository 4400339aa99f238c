"""`python -m collectives cost`: the computed time of each algorithm on a network of many ranks, without MPI."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from collectives.commands.plot import draw
from collectives.launcher import launched_rank
from collectives.schedules import BUILDERS
from collectives.schedules.cost import Network, Price, prices
from collectives.shared.arguments import add_json, add_plot
from collectives.shared.terminal import Commands, UsageError, or_usage_error, positive, print_once
from collectives.shared.units import parse_bandwidth, parse_seconds, parse_sizes, show_seconds
from collectives.texts import show_bytes

MAX_RANKS = 1 << 14  # for more ranks the computation of all messages would take minutes


def add_parser(commands: Commands) -> None:
    """Add the command and its flags."""
    network = Network()
    seconds, bandwidth = or_usage_error(parse_seconds), or_usage_error(parse_bandwidth)
    parser = commands.add_parser("cost", help="compute the time of every algorithm on a network (runs without MPI)")
    parser.add_argument("--ranks", type=positive, required=True, metavar="N", help=f"up to {MAX_RANKS}")
    parser.add_argument("--op", choices=tuple(BUILDERS), default="all_reduce", help="default: all_reduce")
    parser.add_argument(
        "--sizes",
        type=or_usage_error(parse_sizes),
        default="1KiB..1GiB",
        help="bytes of the whole array: a range in steps of 4, or a list such as 1KiB,3MiB (default: 1KiB..1GiB)",
    )
    parser.add_argument(
        "--gpus-per-node", type=positive, default=network.per_node, metavar="G", help="ranks on each node (default: 1)"
    )
    parser.add_argument(
        "--alpha", type=seconds, default="5us", metavar="TIME", help="latency between nodes (default: 5us)"
    )
    parser.add_argument(
        "--beta", type=bandwidth, default="25GB/s", metavar="RATE", help="bandwidth between nodes (default: 25GB/s)"
    )
    parser.add_argument(
        "--node-alpha", type=seconds, default="2us", metavar="TIME", help="latency within a node (default: 2us)"
    )
    parser.add_argument(
        "--node-beta",
        type=bandwidth,
        default="200GB/s",
        metavar="RATE",
        help="bandwidth within a node, between two ranks (default: 200GB/s)",
    )
    parser.add_argument(
        "--links-per-node",
        type=positive,
        metavar="L",
        help="number of messages that a node can send, and receive, at full bandwidth (default: one for each rank)",
    )
    add_plot(parser, "time against size")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Compute the times, print the table, and write the files."""
    if options.ranks > MAX_RANKS:
        raise UsageError(f"argument --ranks: {options.ranks}; expected at most {MAX_RANKS}")
    network = Network(
        options.gpus_per_node,
        options.alpha,
        options.beta,
        options.node_alpha,
        options.node_beta,
        options.links_per_node,
    )
    try:
        results = prices(options.op, options.ranks, network, options.sizes)
    except ValueError as error:
        raise UsageError(f"argument --gpus-per-node: {error}") from None
    title = f"{options.op}, {options.ranks} ranks, {network.per_node} a node"
    if launched_rank() <= 0:
        if options.plot:
            lines = {
                name: [(price.nbytes, price.seconds) for price in results if price.algorithm == name]
                for name in dict.fromkeys(price.algorithm for price in results)
            }
            draw(options.plot, title, _described(network), lines)
        if options.json:
            figures = {"operation": options.op, "ranks": options.ranks, "network": asdict(network)}
            figures["results"] = [asdict(price) for price in results]
            Path(options.json).write_text(json.dumps(figures, indent=1) + "\n")
    print_once(Text(title), Text(_described(network)), _table(results))
    return 0


def _table(results: Sequence[Price]) -> Table:
    """A row for each size, a column for each algorithm; the fastest time in bold, with the best number of segments of a pipeline."""
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("size", justify="right", no_wrap=True)
    names = list(dict.fromkeys(price.algorithm for price in results))
    pipelines = {price.algorithm for price in results if price.num_segments > 1}
    for name in names:
        header = "_\n".join(name.rsplit("_", 1)) if len(name) > 11 else name
        table.add_column(header + ("\n(segments)" if name in pipelines else ""), justify="right", no_wrap=True)
    for nbytes in dict.fromkeys(price.nbytes for price in results):
        group = {price.algorithm: price for price in results if price.nbytes == nbytes}
        fastest = min(price.seconds for price in group.values())
        table.add_row(
            show_bytes(nbytes),
            *(
                Text(
                    show_seconds(group[name].seconds) + (f" ({group[name].num_segments})" if name in pipelines else ""),
                    "bold" if group[name].seconds == fastest else "",
                )
                for name in names
            ),
        )
    return table


def _described(network: Network) -> str:
    links = network.links_per_node or network.per_node
    text = f"between nodes {show_seconds(network.alpha)} and {network.bandwidth / 1e9:g} GB/s a message"
    if network.per_node == 1:
        return text
    within = f"within a node {show_seconds(network.node_alpha)} and {network.node_bandwidth / 1e9:g} GB/s"
    return f"{text}, {links} at a time; {within}"
