"""The command line: `mpirun -np N python -m mpitrain [train|sample|bench|memory] [settings]`."""

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import collectives

USAGE = """usage: python -m mpitrain [train] [--section.name value ...]   train (under mpirun; --help shows all settings)
       python -m mpitrain sample --checkpoint DIR               let a checkpoint write (one process, no mpirun)
       python -m mpitrain bench [--peers none,ddp,fsdp]         time a step beside its peers (under mpirun; --help shows more)
       python -m mpitrain bench --report FILE ...               put several launches' figures together (one process, no mpirun)
       python -m mpitrain memory --np N [--nodes M] [--json]    what a run with the given settings will hold (one process)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Errors that all ranks have are one line, on rank 0."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words and not words[0].startswith("-") else "train"
    if command == "sample":
        return _sample(words)
    if command == "bench" and "--report" in words:
        return _report(words)
    if command == "memory":
        return _memory(words)
    comm = collectives.world()
    asked_for_help = bool({"-h", "--help"} & set(words)) or command == "help"
    if asked_for_help and comm.rank != 0:
        return 0
    try:
        if command == "train":
            _train(words, comm, show_usage=asked_for_help)
        elif command == "bench":
            from mpitrain.bench.command import main as bench

            bench(words, comm)
        elif command == "help":
            print(USAGE, end="")
        else:
            with comm.together():
                raise ValueError(f"unknown command {command!r}; expected train, sample, bench or memory")
    except Exception as error:
        if not collectives.on_all_ranks(error):
            raise  # ends the job, with this rank's traceback
        if comm.rank == 0:
            print(
                "; ".join([f"mpitrain: error: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr, flush=True
            )
        comm.barrier()  # let the line out before the first rank that leaves makes mpirun end the others
        collectives.leave_together()
        return 1
    return 0


def _train(words: list[str], comm: collectives.Communicator, *, show_usage: bool) -> None:
    from mpitrain.config import from_toml, parse

    if show_usage:
        print(USAGE)
        parse(words)  # prints all settings and exits
    with comm.together():
        config = parse(words)
        settings = Path(config.run) / "config.toml"
        if config.train.eval_only and settings.exists():
            config = parse(words, from_toml(settings))  # a run is judged on its own data, by its own settings
    with _no_collections():
        from mpitrain.train.trainer import Trainer  # torch comes in here: settings are known to be right by now

        trainer = Trainer(config, comm)
    trainer.fit()


@contextmanager
def _no_collections() -> Iterator[None]:
    """Python's garbage collector rests. At the end all objects that exist are exempt from it.

    torch's modules make a million objects that stay. Collections among them take an eighth of the start, and later up to 0.1 s each.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _memory(words: list[str]) -> int:
    from mpitrain.memory import command

    if collectives.launched_rank() > 0:
        return 0  # one process is enough, also under mpirun
    try:
        command.main(words)
    except (ValueError, OSError) as error:
        print(f"mpitrain: error: {error}", file=sys.stderr)
        return 1
    return 0


def _sample(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mpitrain sample", description="Let a checkpoint write, in one process."
    )
    parser.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="a checkpoint, or a run's folder: its newest one"
    )
    parser.add_argument("--prompt", default="def ", help="what the text begins with (default: %(default)r)")
    parser.add_argument("--bytes", type=int, default=400, help="how many bytes to write (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="higher is bolder, 0 the likeliest (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed, another text (default: %(default)s)")
    options = parser.parse_args(words)
    if collectives.launched_rank() > 0:
        return 0  # one process is enough, also under mpirun
    from mpitrain.train.sampling import sample

    try:
        for text in sample(
            options.checkpoint, options.prompt, num=options.bytes, temperature=options.temperature, seed=options.seed
        ):
            print(text, end="", flush=True)
    except (ValueError, OSError) as error:
        print(f"mpitrain: error: {error}", file=sys.stderr)
        return 1
    print()
    return 0


def _report(words: list[str]) -> int:
    if collectives.launched_rank() > 0:
        return 0
    from collectives.commands.terminal import UsageError
    from mpitrain.bench.command import report

    try:
        report(words)
    except (ValueError, OSError, UsageError) as error:
        print(f"mpitrain: error: {error}", file=sys.stderr)
        return 1
    return 0
