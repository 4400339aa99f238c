"""The command line: `mpirun -np N python -m mpitrain [train|sample|...] [settings]`: see USAGE."""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import collectives
from collectives import recovery
from collectives.commands.closed_pipe import ends_with_its_reader
from collectives.diagnosis import write_failure
from collectives.diagnosis.checked import DifferentCallsError
from collectives.diagnosis.start.library import one_line_without_mpi
from collectives.texts import shown, without_secrets

USAGE = """usage: python -m mpitrain [train] [--section.name value ...]   train (under mpirun; --help shows all settings)
       python -m mpitrain elastic [options] -- mpirun ...       start a job, and start it again after failures (--help shows more)
       python -m mpitrain tokenizer train [--vocab-size N]      make a tokenizer of documents (one process; --help shows more)
       python -m mpitrain tokenize --out DIR                    make files of tokens of documents (under mpirun; --help shows more)
       python -m mpitrain sample --checkpoint DIR               generate text with a checkpoint (one process, no mpirun)
       python -m mpitrain bench [--peers none,ddp,fsdp]         compare the time of a step (under mpirun; --help shows more)
       python -m mpitrain bench bits [--cases NAME,..]          prove the same bits on other ranks and in other layouts (without mpirun)
       python -m mpitrain bench calls -- COMMAND                count the calls to the file system of a start (without mpirun)
       python -m mpitrain bench recovery [--trials N]           time the next step after a kill, beside torchrun's (without mpirun)
       python -m mpitrain bench data                            time the reading of documents, beside other libraries (one process)
       python -m mpitrain bench monitoring                      time sinks, report and watch (one process)
       python -m mpitrain bench clocks [--minutes M]            prove how well traces align the clocks of hosts (under mpirun)
       python -m mpitrain bench batch-norm                      time SyncBatchNorm, beside one over Gloo (under mpirun)
       python -m mpitrain bench muon                            time Muon's step, beside AdamW's (under mpirun)
       python -m mpitrain bench wire [--beside FILE]            bytes and time of a step for each format between nodes (under mpirun)
       python -m mpitrain bench losses [--cases NAME,..]        what fewer bytes between nodes cost in loss (under mpirun)
       python -m mpitrain bench compression                     time PowerSGD beside torch's hook (under mpirun; --help shows more)
       python -m mpitrain bench --report FILE ...               combine the figures of several launches (one process, no mpirun)
       python -m mpitrain memory --np N [--nodes M] [--json]    predict the memory of a run with these settings (one process)
       python -m mpitrain plan --model M --ranks N --machine X  find the fastest layout of a large run (one process; --help shows more)
       python -m mpitrain plan --measure FILE | --compare FILE  measure this cluster for plans, and check them (under mpirun)
       python -m mpitrain chaos [CASE ...] [--trials N]         harm real jobs, and count how many do what is expected (without mpirun)
       python -m mpitrain watch RUN                             see a run while it runs (one process; --help shows more)
       python -m mpitrain report RUN [RUN ...]                  make a page of one or more runs (one process; --help shows more)
       python -m mpitrain diff A B                              find the first step and tensor in which two runs differ (one process)
       python -m mpitrain stop RUN                              let a run save a checkpoint and stop (one process; --help shows more)
       python -m mpitrain trace RUN --steps N                   trace the next steps of a run (one process; --help shows more)
       python -m mpitrain profile RUN|settings                  say where the time of a step goes (with settings under mpirun)
       python -m mpitrain schedules check|show                  prove or draw the schedules of pipelines (one process)
       python -m mpitrain pack FILE                             put the environment into one file, to start from (one process)
       python -m mpitrain doctor [--run DIR] [--clean]          check the installation; under mpirun the cluster (--help shows more)
"""

_BENCHES = {
    "batch-norm": "mpitrain.tools.bench.parts.batch_norm",
    "clocks": "mpitrain.tools.bench.clocks",
    "compression": "mpitrain.tools.bench.network.compression",
    "losses": "mpitrain.tools.bench.network.losses",
    "muon": "mpitrain.tools.bench.parts.muon",
    "wire": "mpitrain.tools.bench.network.wire",
}
"""The modules of benchmarks under mpirun, by name."""
_BENCHES_ALONE = {
    "bits": "mpitrain.tools.bench.bits.bits_command",
    "calls": "mpitrain.tools.bench.calls",
}
"""The modules of benchmarks in one process, which may start jobs."""
_OF_CHECKOUT = ("data", "monitoring", "recovery")
"""Those in benchmarks/, which the wheel lacks."""


@one_line_without_mpi("mpitrain: error")
def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. For an error that all ranks have, rank 0 prints one line.

    SystemExit with one line on each rank, which is exit code 1, if MPI cannot be loaded.
    """
    with ends_with_its_reader():
        try:
            return _main(list(sys.argv[1:] if argv is None else argv))
        except SystemExit as end:
            if isinstance(end.code, str):  # which Python prints at the end
                end.code = without_secrets(end.code)
                write_failure(end.code, make_folder=False)
            raise


def _main(words: list[str]) -> int:
    command = words.pop(0) if words and not words[0].startswith("-") else "train"
    if command in _ALONE:
        return _in_one_process(_ALONE[command], words)
    if command == "bench" and words[:1] and words[0] in (*_BENCHES_ALONE, *_OF_CHECKOUT):
        return _in_one_process(_bench_alone, words)
    if command == "bench" and "--report" in words:
        return _in_one_process(_report, words)
    if command == "plan" and not _has(words, "--measure", "--compare"):
        return _in_one_process(_plan, words)
    if command == "profile" and words and not words[0].startswith("-"):
        return _in_one_process(_profile, words)
    if command == "doctor":
        from mpitrain.tools.doctor.doctor_command import main as doctor

        return doctor(words)
    if command == "elastic":
        from mpitrain.job.elastic.supervisor.elastic_command import main as elastic

        return elastic(words)
    comm = collectives.world()
    asked_for_help = bool({"-h", "--help"} & set(words)) or command == "help"
    if asked_for_help and comm.rank != 0:
        return 0
    try:
        if command == "train":
            _train(words, comm, show_usage=asked_for_help)
        elif command == "bench" and words[:1] and words[0] in _BENCHES:
            import_module(_BENCHES[words[0]]).main(words[1:], comm)
        elif command == "bench":
            from mpitrain.tools.bench.bench_command import main as bench

            bench(words, comm)
        elif command == "plan":
            _plan_on_ranks(words, comm)
        elif command == "profile":
            from mpitrain.tools.profile.profile_command import main as profile

            profile(words, comm)
        elif command == "tokenize":
            from mpitrain.job.data.tokenize.tokenize_command import main as tokenize

            tokenize(words, comm)
        elif command == "help":
            print(USAGE, end="")
        else:
            with comm.together():
                raise ValueError(
                    f"unknown command {command!r}; expected train, elastic, tokenizer, tokenize, sample, bench, memory, plan, "
                    "watch, report, diff, stop, trace, profile, schedules, pack, doctor or chaos"
                )
    except Exception as error:
        if not collectives.on_all_ranks(error):
            raise  # ends the job, with this rank's traceback
        _mark_refusal(error, collectives.world().rank)
        if collectives.world().rank == 0:
            line = _line("; ".join([str(error), *getattr(error, "__notes__", ())]), error)
            print(line, file=sys.stderr, flush=True)
            write_failure(line, make_folder=False)
        collectives.world().barrier()  # first the line must be out: when a rank leaves, mpirun ends the others
        collectives.leave_together()
        return 1
    return 0


def _train(words: list[str], comm: collectives.Communicator, *, show_usage: bool) -> None:
    from mpitrain.job.config import ConfigError, hidden, of_run, parse

    if show_usage:
        print(USAGE)
        parse(words)  # prints all settings and exits
    with comm.together():
        config = parse(words)
        settings = Path(config.run) / "config.toml"
        if config.train.eval_only and settings.exists():
            config = parse(words, of_run(settings))  # evaluate with the run's own data and settings
        if of_secrets := hidden(config):
            raise ConfigError(
                f"{of_secrets[0]}: the address has a secret, which is not taken from the run's folder; give the setting again, or "
                f"--config {settings}"
            )
    if config.log.modules:
        from mpitrain.job.record.adding import import_modules

        with comm.together():
            import_modules(config.log.modules)
    if config.train.elastic and not config.train.eval_only:
        if not (obstacle := recovery.obstacle()):
            from mpitrain.job.train.elastic import train

            train(config, comm, _no_collections)
            return
        if comm.rank == 0:
            print(f"train.elastic: a lost rank ends this job, because {obstacle}", flush=True)
    with _no_collections():
        from mpitrain.job.train.trainer import Trainer  # imports torch, so it follows the check of the settings

        trainer = Trainer(config, comm)
    trainer.fit()


def _mark_refusal(error: Exception, rank: int) -> None:
    """Tell the supervisor, if there is one, that these settings cannot work. A folder that another job trains in may become free."""
    from mpitrain.job.config import ConfigError, FolderInUseError
    from mpitrain.job.record.files import marks

    if rank == 0 and isinstance(error, ConfigError) and not isinstance(error, FolderInUseError):
        marks.refuse()


@contextmanager
def _no_collections() -> Iterator[None]:
    """Turn off Python's garbage collector in the block, and exempt all objects that exist at its end.

    torch's modules make a million permanent objects. Collections of them take an eighth of the start, and later up to 0.1 s each.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _in_one_process(run: Callable[[list[str]], int | None], words: list[str]) -> int:
    """Run a command that needs no other ranks: under mpirun the first rank runs it. An error is one line."""
    if collectives.launched_rank() > 0:
        return 0
    try:
        with ends_with_its_reader():
            return run(words) or 0
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        line = _line(str(error), error)
        print(line, file=sys.stderr)
        write_failure(line, make_folder=False)
        return 1
    except KeyboardInterrupt:
        print("mpitrain: interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT, as of a shell


def _line(text: str, error: Exception) -> str:
    """The line of an error. Names of files and values in it may be a stranger's, and addresses may have secrets. The errors of jobs
    that a command has started have several lines, and so has a table of the calls of ranks."""
    has_lines = isinstance(error, DifferentCallsError) or not isinstance(error, ValueError | OSError)
    return f"mpitrain: error: {shown(without_secrets(text), lines=has_lines)}"


def _memory(words: list[str]) -> None:
    from mpitrain.tools.plan.memory import memory_command

    memory_command.main(words)


def _plan(words: list[str]) -> int:
    from mpitrain.tools.plan import plan_command
    from mpitrain.tools.plan.comparing import compare_command

    if not _has(words, "--compare-report"):
        return plan_command.main(words)
    compare_command.report(words)
    return 0


def _plan_on_ranks(words: list[str], comm: collectives.Communicator) -> None:
    from mpitrain.tools.plan.comparing import compare_command
    from mpitrain.tools.plan.measuring import measure_command

    (measure_command if _has(words, "--measure") else compare_command).main(words, comm)


def _has(words: list[str], *flags: str) -> bool:
    """Whether one of the flags is among the words, also as --flag=value."""
    return any(word.partition("=")[0] in flags for word in words)


def _schedules(words: list[str]) -> int:
    from mpitrain.stages import schedules_command

    return schedules_command.main(words)


def _tokenizer(words: list[str]) -> None:
    from mpitrain.job.data.tokenize.tokenize_command import train_tokenizer

    train_tokenizer(words)


def _chaos(words: list[str]) -> int:
    from mpitrain.tools.bench.jobs.checkout import benchmark

    return int(benchmark("chaos.chaos_command", "chaos").main(words))


def _watch(words: list[str]) -> int:
    from mpitrain.view.watch import watch_command

    return watch_command.main(words)


def _diff(words: list[str]) -> int:
    from mpitrain.view.diff import diff_command

    return diff_command.main(words)


def _page(words: list[str]) -> int:
    from mpitrain.view.report import report_command

    return report_command.main(words)


def _pack(words: list[str]) -> None:
    from mpitrain.tools.doctor.pack import pack_command

    pack_command.main(words)


def _stop(words: list[str]) -> int:
    from mpitrain.job.train import stop_request

    return stop_request.main(words)


def _trace(words: list[str]) -> int:
    from mpitrain.view.trace import trace_command

    return trace_command.main(words)


def _profile(words: list[str]) -> int:
    from mpitrain.tools.profile import profile_command

    return profile_command.of_run(words)


def _bench_alone(words: list[str]) -> int:
    if words[0] in _OF_CHECKOUT:
        from mpitrain.tools.bench.jobs.checkout import benchmark

        return int(benchmark(f"{words[0]}.{words[0]}_command", f"bench {words[0]}").main(words[1:]))
    return int(import_module(_BENCHES_ALONE[words[0]]).main(words[1:]))


def _sample(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mpitrain sample", description="Generate text with a checkpoint, in one process."
    )
    parser.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="a checkpoint, or a run's folder (its newest checkpoint)"
    )
    parser.add_argument("--prompt", default="def ", help="beginning of the text (default: %(default)r)")
    parser.add_argument(
        "--bytes", type=int, default=400, help="number of tokens to generate, such as bytes (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="higher: more random; 0: most probable bytes (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random draws (default: %(default)s)")
    parser.add_argument("--tokenizer", metavar="FILE", help="the run's tokenizer.json, if it is at another place now")
    options = parser.parse_args(words)
    from mpitrain.job.train.sampling import sample

    is_shown = sys.stdout.isatty()
    for text in sample(
        options.checkpoint,
        options.prompt,
        num=options.bytes,
        temperature=options.temperature,
        seed=options.seed,
        tokenizer_file=options.tokenizer,
    ):
        print(shown(text, lines=True) if is_shown else text, end="", flush=True)
    print()


def _report(words: list[str]) -> None:
    from mpitrain.tools.bench.bench_command import report

    report(words)


_ALONE: dict[str, Callable[[list[str]], int | None]] = {
    "chaos": _chaos,
    "diff": _diff,
    "memory": _memory,
    "pack": _pack,
    "report": _page,
    "sample": _sample,
    "schedules": _schedules,
    "tokenizer": _tokenizer,
    "stop": _stop,
    "trace": _trace,
    "watch": _watch,
}
