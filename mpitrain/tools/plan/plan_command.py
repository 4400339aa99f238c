"""`python -m mpitrain plan`: considers all layouts of a model on a machine, and compares the cost model with published runs."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from collectives import is_live_terminal
from collectives.shared.pictures import need_matplotlib
from mpitrain.job.record.machine import machine as machines
from mpitrain.tools.plan import layout as layouts
from mpitrain.tools.plan import plan_report, settings
from mpitrain.tools.plan.learning_rate import RULES, LearningRate, scaled
from mpitrain.tools.plan.overhead import overhead_of
from mpitrain.tools.plan.price import stage_times
from mpitrain.tools.plan.search import PlanJob, SearchResult, search
from mpitrain.tools.plan.simulation import draw, simulate, simulate_command
from mpitrain.tools.plan.transformer import NAMED, find, in_settings

FIXED = {
    "tensor": "ranks that hold each layer together",
    "pipeline": "stages of the pipeline's ranks",
    "context": "ranks that share a sequence",
    "experts": "ranks that share experts",
    "micro": "sequences of a micro-batch",
    "zero": "ZeRO stage",
    "copies": "copies of the shards",
    "stages_per_rank": "of the schedule interleaved",
}
"""Numbers of a layout that the user can fix, each with what it is."""


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code. ValueError or OSError for wrong arguments and files."""
    options = _parser().parse_args(argv)
    if options.plot is not None:
        need_matplotlib()
    if options.published:
        _published(options.plot)
        return 0
    missing = [f"--{name}" for name in ("model", "ranks", "machine", "batch") if getattr(options, name) is None]
    if missing:
        raise ValueError(
            f"plan: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; --help shows all options"
        )
    if options.plot is not None and not options.simulate:
        raise ValueError("plan: --plot needs --published or --simulate")
    machine = machines.load(options.machine)
    fixed = tuple(
        (name, getattr(options, f"fixed_{name}")) for name in FIXED if getattr(options, f"fixed_{name}") is not None
    )
    fixed += tuple(
        (name, getattr(options, name)) for name in ("schedule", "recompute") if getattr(options, name) is not None
    )
    model = find(options.model, options.context)
    lr = _learning_rate(options, options.batch * model.context)
    found = search(PlanJob(model, machine, layouts.NAMED[options.software], options.ranks, options.batch, fixed))
    if options.simulate:
        _simulate(options, found)
        return 0
    price = options.price if options.price is not None else machine.price
    if options.json:
        print(json.dumps(plan_report.as_data(found, options.top, price, options.tokens, lr), indent=1))
    else:
        live = is_live_terminal()
        console = Console(width=None if live else 130, force_terminal=live, highlight=False)
        plan_report.show(console, found, options.top, price, options.tokens, lr)
    if options.write is not None:
        _write(options.write, found, lr, is_quiet=options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpitrain plan",
        description="Considers all layouts of a model on a machine: which fit, and how long a step takes. One process, without MPI. "
        "Under mpirun: --measure FILE writes the machine file of the cluster at hand, and --compare MACHINE compares predicted with "
        "measured steps; each has its own --help.",
    )
    parser.add_argument("--model", help=f"{', '.join(NAMED)}, or a transformers config.json")
    parser.add_argument("--ranks", type=_count, help="number of ranks: GPUs, or processes on CPUs")
    parser.add_argument("--machine", metavar="NAME|FILE", help=f"{', '.join(machines.names())}, or a TOML file")
    parser.add_argument("--batch", type=_count, help="sequences of a step")
    parser.add_argument("--context", type=_count, help="tokens of a sequence (default: the model's)")
    parser.add_argument(
        "--software", choices=[*layouts.NAMED], default="mpitrain", help="the training program (default: mpitrain)"
    )
    parser.add_argument(
        "--price", type=_positive, help="of one rank for an hour (default: the machine's, if its file has one)"
    )
    parser.add_argument(
        "--tokens", type=_positive, help="tokens of the whole training, such as 300e9: prints days and cost"
    )
    parser.add_argument("--top", type=_count, default=10, help="number of plans to print (default: 10)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the best plan as settings for --config")
    fixing = parser.add_argument_group("a layout in part", "consider only layouts with this number")
    for name, what in FIXED.items():
        flag = "--context-ranks" if name == "context" else "--" + name.replace("_", "-")
        kind = _stage if name == "zero" else _count
        fixing.add_argument(flag, type=kind, dest=f"fixed_{name}", metavar="N", help=what)
    fixing.add_argument("--schedule", choices=layouts.MPITRAIN.schedules, help="of the pipeline")
    fixing.add_argument("--recompute", choices=layouts.MPITRAIN.recompute, help="activations that are computed again")
    rates = parser.add_argument_group("learning rate", "state it for another batch")
    rates.add_argument("--lr", type=_positive, help="a learning rate that is good for --lr-batch")
    rates.add_argument("--lr-batch", type=_count, help="sequences")
    rates.add_argument(
        "--lr-rule", choices=[*RULES], default="sqrt", help="how it changes with the batch (default: sqrt)"
    )
    rates.add_argument("--warmup-tokens", type=_positive, help="tokens of the warm-up, which stay the same")
    comparing = parser.add_argument_group("published runs")
    comparing.add_argument(
        "--published", action="store_true", help="print the predictions beside tables of papers, as Markdown"
    )
    comparing.add_argument("--plot", metavar="FILE", help="also write a picture of them, or of --simulate, as SVG")
    simulate_command.options(parser)
    return parser


def _count(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {word}")
    return int(word)


def _stage(word: str) -> int:
    if word not in ("0", "1", "2", "3"):
        raise argparse.ArgumentTypeError(f"expected 0, 1, 2 or 3, got {word}")
    return int(word)


def _positive(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {word}")
    return number


def _learning_rate(options: Any, tokens_of_step: int) -> LearningRate | None:
    if options.lr is None:
        if options.lr_batch is not None or options.warmup_tokens is not None:
            raise ValueError("plan: --lr-batch and --warmup-tokens need --lr, the learning rate that is known")
        return None
    known_batch = options.lr_batch or options.batch
    return scaled(
        options.lr,
        known_batch,
        options.batch,
        options.lr_rule,
        warmup_tokens=options.warmup_tokens,
        tokens_of_step=tokens_of_step,
    )


def _simulate(options: argparse.Namespace, found: SearchResult) -> None:
    """Simulate a run by the best plan, and print or draw it."""
    plan = found.best
    if plan is None:
        raise ValueError("plan: no layout fits that the trainer can run, so there is nothing to simulate")
    layout, seconds, of = plan.layout, plan.price.seconds, found.job
    job = simulate_command.job_of(
        options,
        layouts.scheduled(layout.schedule, layout.pipeline, layout.num_micro, layout.stages_per_rank),
        stage_times(of.model, of.machine, of.software, layout),
        copies=layout.data * layout.context,
        tensor_ranks=layout.tensor,
        reduction_s=seconds["gradients"] + seconds["gathers"],
        optimizer_s=seconds["optimizer"] + overhead_of(of.machine, layout)[0],
        tokens=of.tokens,
    )
    outcome = simulate(job, options.seed)
    if options.json:
        print(json.dumps({"layout": layout._asdict(), **outcome.to_dict()}, indent=1))
    else:
        live = is_live_terminal()
        console = Console(width=None if live else 130, force_terminal=live, highlight=False)
        console.print(f"{of.model.name}, {of.ranks} ranks of {of.machine.name}: {plan_report.told(plan)}")
        simulate_command.show(outcome, console)
    if options.plot is not None:
        draw(outcome, options.plot)


def _write(path: Path, found: SearchResult, lr: LearningRate | None, *, is_quiet: bool) -> None:
    if found.best is None:
        raise ValueError(f"plan: no layout fits that the trainer can run, so {path} was not written")
    path.write_text(settings.to_toml(found.best, lr), encoding="utf-8")
    if not is_quiet:
        model = found.job.model.name
        if in_settings(found.job.model):
            print(f"wrote {path}; use it with --config {path}")
        else:
            print(
                f"wrote {path}, without [model]: the trainer lacks {model}; add [model] for a model of your own before use"
            )


def _published(plot: str | None) -> None:
    from mpitrain.tools.bench.jobs.checkout import benchmark

    report = benchmark("published.published_report", "plan --published")
    print(report.markdown(), end="")
    if plot is not None:
        report.plot(plot)
