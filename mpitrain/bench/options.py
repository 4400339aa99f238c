"""The command line of `bench`. Neither torch nor MPI here: wrong arguments are found before either is loaded."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from collectives.commands.measuring import names_of
from collectives.commands.terminal import positive
from mpitrain.bench.results import Case

PEERS = ("none", "ddp", "fsdp", "deepspeed")
OURS = "mpitrain"
STEPS, OVERHEAD_STEPS = 8, 50


@dataclass(frozen=True)
class Options:
    """What to measure, on what, and where to write it."""

    contestants: tuple[str, ...]
    """Ours first. One alone: its memory is measured too."""
    cases: tuple[Case, ...]
    steps: int
    threads: int
    overhead: bool
    report: tuple[str, ...]
    """Files to put together, instead of measuring."""
    json: str | None
    plot: str | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"bench: {message}")


def parse(words: Sequence[str]) -> Options:
    """ValueError for wrong arguments."""
    given = _parser().parse_args(list(words))
    shapes = given.shapes or [(given.width, given.layers, given.batch)]
    cases = tuple(
        Case(width=width, layers=layers, heads=given.heads, context=given.context, batch=batch)
        for width, layers, batch in shapes
    )
    for case in cases:
        try:
            case.config()
        except ValueError as error:
            raise ValueError(f"bench: {error}") from None
    if given.only and len(cases) > 1:
        raise ValueError(
            "bench: --only measures the peak of a process, which one model alone can have; pass one shape with it"
        )
    return Options(
        contestants=(given.only,) if given.only else (OURS, *given.peers),
        cases=cases,
        steps=given.steps or (OVERHEAD_STEPS if given.overhead else STEPS),
        threads=given.threads,
        overhead=given.overhead,
        report=tuple(given.report or ()),
        json=given.json,
        plot=given.plot,
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m mpitrain bench",
        description="Times training steps beside the peers', in turn, in one launch (under mpirun). For figures that can be compared: "
        "several launches with --json, those of --only among them, then --report.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--peers",
        type=lambda text: names_of(PEERS)(text) if text else [],
        default=list(PEERS[:3]),
        metavar="NAME,..",
        help="none: each rank alone on an unsharded copy; ddp, fsdp: torch's, on Gloo, or NCCL; deepspeed: ZeRO stage 3, if it is "
        "installed (default: none,ddp,fsdp)",
    )
    what.add_argument(
        "--only", choices=(OURS, *PEERS), help="this one alone, and the peak of its memory: of a process of its own"
    )
    what.add_argument(
        "--overhead", action="store_true", help="instead: what hooks and bookkeeping add to a step of 200 small units"
    )
    what.add_argument(
        "--report", nargs="+", metavar="FILE", help="instead: the medians over the launches of these --json (no mpirun)"
    )
    numbers = {
        "width": (1024, "of the model"),
        "layers": (8, "of the model"),
        "heads": (8, "of the model"),
        "context": (128, "tokens of a sequence"),
        "batch": (1, "sequences a rank and step"),
        "threads": (1, "of a rank"),
    }
    for name, (default, text) in numbers.items():
        parser.add_argument(f"--{name}", type=positive, default=default, help=f"{text} (default: {default})")
    parser.add_argument(
        "--shapes",
        type=parse_shapes,
        metavar="WxLxB,..",
        help="several models, one after the other, by width, layers and batch, such as 1024x8x1,512x6x4",
    )
    parser.add_argument(
        "--steps",
        type=positive,
        help=f"that are timed (default: {STEPS}; of --overhead, which are short, {OVERHEAD_STEPS})",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    parser.add_argument(
        "--plot",
        metavar="FILE.png",
        help="also draw where a step's time goes (needs matplotlib, pip install mpitrain[plot])",
    )
    return parser


def parse_shapes(text: str) -> list[tuple[int, int, int]]:
    """'1024x8x1,512x6x4' as (width, layers, batch) of each."""
    shapes = []
    for part in text.split(","):
        numbers = part.strip().split("x")
        if len(numbers) != 3 or not all(number.isdecimal() and int(number) for number in numbers):
            raise argparse.ArgumentTypeError(f"{part!r}; expected width x layers x batch, such as 1024x8x1,512x6x4")
        width, layers, batch = map(int, numbers)
        shapes.append((width, layers, batch))
    return list(dict.fromkeys(shapes))
