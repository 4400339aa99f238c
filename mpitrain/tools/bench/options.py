"""The command line of `bench`. No import of torch or MPI, so that wrong arguments are reported before these are loaded."""

import argparse
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NoReturn

from collectives.shared.arguments import add_json, add_plot, add_report, names_of
from collectives.shared.terminal import positive
from mpitrain.stages.schedules import SCHEDULES
from mpitrain.tools.bench.results import BenchCase

OURS, TENSOR, SEQUENCE = "mpitrain", "tensor", "sequence"
PIPELINES = tuple(SCHEDULES)
PEERS = (
    *("none", "ddp", "fsdp", "deepspeed", TENSOR, SEQUENCE, "torch-tensor", "torch-sequence"),
    *(*PIPELINES, "torch-gpipe", "torch-1f1b", "torch-interleaved", "torch-zb-v"),
)
NO_DEEPSPEED = "it is not installed (pip install deepspeed)"
STEPS, OVERHEAD_STEPS = 8, 50


class _Help(argparse.HelpFormatter):
    """Breaks no line within a name such as power-sgd-4. Each line of a description or an epilog is a paragraph; a line that begins
    with spaces stays as it is."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(
            line if line.startswith(" ") else textwrap.fill(line, width, break_on_hyphens=False)
            for line in text.splitlines()
        )


class Parser(argparse.ArgumentParser):
    """A parser of a bench's arguments whose error is a ValueError with the name of the bench."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Help, **options)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog.removeprefix('python -m mpitrain ')}: {message}")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments, with `contestants` (ours first; if there is only one, its memory is measured too) and `cases`. ValueError."""
    given = _parser().parse_args(list(words))
    given.contestants = [given.only] if given.only else [OURS, *given.peers]
    given.steps = given.steps or (OVERHEAD_STEPS if given.overhead else STEPS)
    shapes = given.shapes or [(given.width, given.layers, given.batch)]
    given.cases = [BenchCase(width, layers, given.heads, given.context, batch) for width, layers, batch in shapes]
    for case in given.cases:
        try:
            case.config()
        except ValueError as error:
            raise ValueError(f"bench: {error}") from None
    if given.only and len(shapes) > 1:
        raise ValueError(
            "bench: --only measures the peak memory of the process, so it takes only one model; pass one shape with it"
        )
    if given.only == "deepspeed" and not has_deepspeed():
        raise ValueError(f"bench: --only deepspeed: {NO_DEEPSPEED}")
    return given


def has_deepspeed() -> bool:
    return find_spec("deepspeed") is not None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m mpitrain bench",
        description="Times our training steps and those of other libraries, in turn, in one launch (under mpirun). For figures that "
        "can be compared: several launches with --json, also with --only, then --report.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--peers", type=names_of(PEERS, or_none=True), default=list(PEERS[:3]), metavar="NAME,..",
        help="none: each rank alone on an unsharded copy; ddp, fsdp: of torch, with Gloo or NCCL; deepspeed: ZeRO stage 3, if it is "
        "installed; tensor, sequence: our tensor parallelism over all ranks, without and with sequence parallelism; torch-tensor, "
        "torch-sequence: torch's; gpipe, 1f1b, interleaved, zb-h1, zb-v, dualpipe-v: our pipelines over all ranks, one sequence in a "
        "micro-batch; torch-gpipe, torch-1f1b, torch-interleaved, torch-zb-v: torch's (default: none,ddp,fsdp)",
    )  # fmt: skip
    what.add_argument("--only", choices=(OURS, *PEERS), help="measure only this one, and the peak of its memory")
    what.add_argument(
        "--overhead",
        action="store_true",
        help="measure instead what hooks and bookkeeping add to a step of 200 small units",
    )
    add_report(what)
    numbers = {
        "width": (1024, "width of the model"),
        "layers": (8, "layers of the model"),
        "heads": (8, "attention heads per layer"),
        "context": (128, "tokens per sequence"),
        "batch": (1, "sequences per rank and step"),
        "threads": (1, "threads per rank"),
    }
    for name, (default, text) in numbers.items():
        parser.add_argument(f"--{name}", type=positive, default=default, help=f"{text} (default: {default})")
    parser.add_argument(
        "--shapes", type=parse_shapes, metavar="WxLxB,..",
        help="several models, one after the other: width x layers x batch of each, such as 1024x8x1,512x6x4",
    )  # fmt: skip
    parser.add_argument(
        "--steps",
        type=positive,
        help=f"number of timed steps (default: {STEPS}; with --overhead, where steps are short: {OVERHEAD_STEPS})",
    )
    add_json(parser)
    add_plot(parser, "where a step's time goes")
    return parser


def parse_shapes(text: str) -> list[tuple[int, int, int]]:
    """(width, layers, batch) of each shape in a text such as '1024x8x1,512x6x4'."""
    shapes = []
    for part in text.split(","):
        numbers = part.strip().split("x")
        if len(numbers) != 3 or not all(number.isdecimal() and int(number) for number in numbers):
            raise argparse.ArgumentTypeError(f"{part!r}; expected width x layers x batch, such as 1024x8x1,512x6x4")
        width, layers, batch = map(int, numbers)
        shapes.append((width, layers, batch))
    return list(dict.fromkeys(shapes))
