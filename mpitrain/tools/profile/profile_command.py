"""`mpirun -np N python -m mpitrain profile [options] [settings]`: a short run, measured by layer; and `profile RUN` of a record."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console, RenderableType

from collectives import Communicator
from collectives.shared.terminal import console, positive
from collectives.texts import shown
from mpitrain.job.config import Config, ConfigError, TrainConfig, check_ranks, parse
from mpitrain.job.record.adding import Added, import_modules
from mpitrain.job.record.machine import machine as machines
from mpitrain.tools.profile.advice import Advised, advised
from mpitrain.tools.profile.fitting import figures_of
from mpitrain.tools.profile.parts import Parts, parts_of
from mpitrain.tools.profile.recorded import tables_of_run
from mpitrain.tools.profile.sentences import sentences
from mpitrain.tools.profile.table import tables
from mpitrain.view.picture import recorder, svg_file, write_svg, writing

STEPS, WARM_UP = 10, 3
_WIDTH = 150  # characters of a line of a picture

USAGE = f"""usage: mpirun -np N python -m mpitrain profile [options] [settings]   measure a short run with these settings
       python -m mpitrain profile RUN [--machine NAME|FILE] [--svg FILE]  analyse the record of a run (one process, no mpirun)

Says where the time of a step goes by layer, what waits for what, what to try, and what holds the memory at the peak.

  --steps N            measured steps (default: {STEPS})
  --warm-up N          steps before them (default: {WARM_UP})
  --all                a line for each block
  --machine NAME|FILE  the machine for the gains, a file of plan --measure (default: one fitted to the measured step)
  --json FILE          also write the figures
  --svg FILE           also write the output as a picture

The settings are those of a training run; --config RUN/config.toml takes those of a run. Only --json and --svg write files. With
--json RUN/profile.json, `profile RUN` shows the layers too.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"profile: {message}")


def main(words: Sequence[str], comm: Communicator) -> None:
    """Measure, and print on rank 0. Collective. Errors are raised on all ranks."""
    if {"-h", "--help"} & set(words):
        print(USAGE)
        parse(list(words))  # prints all settings and exits
    with comm.together():
        options, rest = _parser().parse_known_args(list(words))
        config = _with_batch(rest, comm.size)
        machine = None if options.machine is None else machines.load(options.machine)
        import_modules(config.log.modules)
        Added.sinks.clear()  # the steps of a profile are no record, but callbacks cost their time in each step
    with comm.together():
        if comm.rank == 0:
            for option, file in (("--json", options.json), ("--svg", options.svg)):
                if file is not None:
                    with writing(option, file):
                        file.open("a").close()
    if comm.rank == 0:
        print(f"profile: {options.warm_up} steps to warm up, then {options.steps} measured ones", file=sys.stderr)
    from mpitrain.tools.profile.steps import measured_run  # imports torch, so it follows the check of the settings

    run = measured_run(config, comm, warm_up=options.warm_up, steps=options.steps)
    with comm.together():
        if comm.rank:
            return
        ranks = run.ranks
        parts = parts_of(
            [rank.times for rank in ranks],
            [rank.stage for rank in ranks],
            [rank.cpu for rank in ranks],
            [rank.hidden for rank in ranks],
        )
        held = [rank.held for rank in ranks]
        figures = figures_of(parts, ranks[0].own_flops_per_s, comm.num_nodes, is_cpu=run.is_cpu, memory=run.memory)
        found = sentences(parts, run.pipelines)
        advice = advised(config, comm.size, figures, machine)
        shown = [*tables(parts, held, every_block=options.all)]
        show(shown, found, advice, svg=options.svg)
        if options.json is not None:
            document = to_dict(parts, found, advice) | {"memory": [each._asdict() for each in held]}
            with writing("--json", options.json):
                options.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


def of_run(words: list[str]) -> int:
    """Print what the record of a run tells; returns the exit code. ValueError or OSError for wrong arguments and files."""
    parser = _Parser(prog="python -m mpitrain profile", usage=USAGE.removeprefix("usage: "), allow_abbrev=False)
    parser.add_argument("run")
    parser.add_argument("--machine")
    parser.add_argument("--svg", type=svg_file)
    options, rest = parser.parse_known_args(words)
    if rest:
        raise ValueError(
            f"profile: a run is analysed with --machine and --svg only, got {' '.join(rest)}; --steps, --warm-up, --all, --json and "
            "settings belong to a profile under mpirun: mpirun -np N python -m mpitrain profile [options] [settings]"
        )
    of, shown = tables_of_run(options.run, None if options.machine is None else machines.load(options.machine))
    show(shown, of.found, of.advice, of.notes, svg=options.svg)
    return 0


def show(
    tables: Sequence[RenderableType],
    found: Sequence[str],
    advice: Advised | None,
    notes: Sequence[str] = (),
    *,
    svg: Path | None = None,
) -> None:
    """Print a profile, and draw it to the file `svg`. OSError if the file cannot be written."""
    _print(console(), tables, found, advice, notes)
    if svg is not None:
        picture = recorder(_WIDTH)
        _print(picture, tables, found, advice, notes)
        write_svg(picture, svg, title="mpitrain profile")


def _print(
    out: Console,
    tables: Iterable[RenderableType],
    found: Sequence[str],
    advice: Advised | None,
    notes: Sequence[str],
) -> None:
    out.print(*tables, sep="\n")
    for heading, lines in (
        ("what waits for what", found),
        ("what to try", [] if advice is None else [*advice.lines()]),
        ("notes", notes),
    ):
        if lines:
            out.print(heading, style="bold")
            out.print(*(f"  {shown(line)}" for line in lines), sep="\n", markup=False)


def to_dict(parts: Parts, found: Sequence[str], advice: Advised) -> dict[str, Any]:
    """For JSON."""
    larger = advice.larger_batch
    return {
        "parts": parts.to_dict(),
        "step_s": parts.step_s,
        "waits": list(found),
        "model": {"predicted_s": advice.predicted_s, "measured_s": advice.measured_s, "machine": advice.machine},
        "advice": [{"settings": dict(each.settings), "gain": each.gain} for each in advice.advice],
        "larger_batch": None if larger is None else {"settings": dict(larger.settings), "gain_per_token": larger.gain},
    }


def _parser() -> _Parser:
    parser = _Parser(prog="mpirun -np N python -m mpitrain profile", add_help=False, allow_abbrev=False)
    parser.add_argument("--steps", type=positive, default=STEPS)
    parser.add_argument("--warm-up", type=positive, default=WARM_UP)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--machine")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=svg_file)
    return parser


def _with_batch(words: Sequence[str], num_ranks: int) -> Config:
    """The settings. Without train.batch the default is rounded up to a multiple of what shares it."""
    config = parse(list(words))
    try:
        check_ranks(config, num_ranks)
    except ConfigError:
        factor = num_ranks * config.train.accumulate
        rounded = parse(list(words), Config(train=TrainConfig(batch=-(-config.train.batch // factor) * factor)))
        check_ranks(rounded, num_ranks)  # the error of settings that do not fit
        return rounded
    return config
