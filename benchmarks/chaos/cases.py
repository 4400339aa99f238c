"""The rows of the table: what is done to which job, and what is expected."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from signal import SIGINT, SIGKILL, SIGTERM
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.chaos import disk, harms, verdicts
from benchmarks.chaos.attacked import ATTACK
from benchmarks.chaos.harms import Harmer
from benchmarks.chaos.verdicts import Verdict
from mpitrain.tools.bench.jobs import checkout

_ALONE = ("--train.sample_bytes", "0", "--train.eval_batches", "0")
_ELASTIC = (*_ALONE, "--train.elastic", "true")
_MODEL_101M = ("--model.width", "768", "--model.layers", "14", "--model.heads", "12", "--model.context", "128")
_LARGE = (*_ELASTIC, *_MODEL_101M, "--train.copy_every", "5")
_MODEL_SMALL = ("--model.width", "32", "--model.layers", "2", "--model.heads", "2", "--model.context", "32")
_NOTICED_S = 3.0
_SECONDS = 6.5  # of all steps of the tiny model; a harm that comes after them does not count
_DEADLINE_S = 3.0
_NO_ENV: Mapping[str, str] = MappingProxyType({})

Launch = Callable[[], tuple[tuple[str, ...], dict[str, str]]]


class Case(NamedTuple):
    """A row of the table.

    `fault`: of tools/bench/jobs/harmed.py, if the job harms itself. `module`: what the job runs. `seconds`: of a long run,
    beyond minutes. `disk_bytes`: the size of a file system of its own for the job's folder, 0 for none.
    """

    name: str
    words: str
    launch: Launch
    num_ranks: int
    settings: tuple[str, ...]
    harm: Harmer
    verdict: Verdict
    num_steps: int = 60
    fault: str = ""
    env: Mapping[str, str] = _NO_ENV
    seconds: float = 0.0
    needs_reference: bool = True
    disk_bytes: int = 0
    module: str = "mpitrain"


def _in_place(
    name: str,
    words: str,
    ranks: int | tuple[int, int],
    harm: Harmer,
    *settings: str,
    base: tuple[str, ...] = _ELASTIC,
    num_steps: int = 60,
    max_repeated: int = 10,
) -> Case:
    """Ranks are lost, and the others go on. `ranks`: on this host, or hosts and ranks on each."""
    if isinstance(ranks, tuple):
        launch, num_ranks = partial(checkout.cluster, *ranks), ranks[0] * ranks[1]
    else:
        launch, num_ranks = partial(checkout.mpirun, ranks), ranks
    settings = (*base, "--train.steps", str(num_steps), *settings)
    return Case(name, words, launch, num_ranks, settings, harm, verdicts.goes_on(max_repeated), num_steps)


def _stuck(fault: str, words: str) -> list[Case]:
    """A rank does not come. Without ULFM, so that the job ends."""
    settings, env = (*_ALONE, "--train.steps", "60"), {"MPITRAIN_DEADLINE_S": str(_DEADLINE_S)}
    words += " (seconds from the deadline on)"
    return [
        Case(
            name, where, launch, 4, settings, harms.by_itself, verdicts.is_named(_DEADLINE_S, within_s),
            fault=fault, env=env, needs_reference=False,
        )
        for name, where, launch, within_s in (
            (fault, words, partial(checkout.mpirun, 4, elastic=False), 2.0),
            (f"{fault}-hosts", f"{words}, 2 hosts x 2 ranks", partial(checkout.cluster, 2, 2, elastic=False), 7.0),
        )
    ]  # fmt: skip


def _left_behind(fault: str, words: str) -> Case:
    """A rank does not come, and the others go on without it."""
    settings, env = (*_ELASTIC, "--train.steps", "60"), {"MPITRAIN_DEADLINE_S": str(_DEADLINE_S)}
    return Case(
        f"{fault}-elastic", f"{words}, with train.elastic and a deadline of {_DEADLINE_S:g} s", partial(checkout.mpirun, 4), 4,
        settings, harms.by_itself, verdicts.goes_on(10), fault=fault, env=env,
    )  # fmt: skip


def _host(name: str, words: str, *, cut: bool) -> Case:
    """The loss of a host, under the supervisor."""
    settings = (*_ELASTIC, "--train.steps", "60")
    return Case(
        name, words, partial(checkout.supervised_cluster, 2, 2), 4, settings, harms.host(_SECONDS, cut=cut),
        verdicts.is_started_again(10, 12.0),  # the supervisor waits 3 s after the report of the ranks
    )  # fmt: skip


def _ends(name: str, words: str, harm: Harmer, *settings: str, elastic: bool = False) -> Case:
    """The job ends early, and the same command goes on."""
    settings = (*(_ELASTIC if elastic else _ALONE), "--train.steps", "60", "--checkpoint.every", "20", *settings)
    launch = partial(checkout.mpirun, 2, elastic=elastic)
    verdict = verdicts.is_resumed(leaves_copies=elastic, leaves_stages=True)
    return Case(name, words, launch, 2, settings, harm, verdict)


def _disk_full(name: str, words: str) -> Case:
    settings = (*_ALONE, "--train.steps", "60", "--checkpoint.every", "5")
    launch = partial(checkout.mpirun, 2, elastic=False)
    return Case(
        name, words, launch, 2, settings, disk.fills(_SECONDS), verdicts.is_refused_and_resumed, disk_bytes=128 << 20
    )  # fmt: skip


def _flipped(name: str, words: str, num_ranks: int, every: int, *settings: str) -> Case:
    settings = (*_ALONE, "--train.steps", "60", "--train.check_every", str(every), *settings)
    launch = partial(checkout.mpirun, num_ranks, elastic=False)
    return Case(
        name, words, launch, num_ranks, settings, harms.by_itself, verdicts.is_found(every), fault="flip", needs_reference=False
    )  # fmt: skip


def _slow(fault: str, cause: str, words: str) -> Case:
    """A rank that takes 1.4 times as long, from some step on."""
    settings = (*_ALONE, "--train.steps", "140")
    launch = partial(checkout.mpirun, 2, elastic=False)
    return Case(
        fault, words, launch, 2, settings, harms.by_itself, verdicts.names_slow_rank(cause), 40, fault, needs_reference=False
    )  # fmt: skip


def _attacked(kind: str, words: str) -> list[Case]:
    """Another user attacks all connections between ranks, and a rank is killed."""
    return [
        Case(
            f"ring-{kind}{suffix}", f"another user {words}{where}, then kill -9 of a random rank", launch, 4,
            (*_ELASTIC, *_MODEL_SMALL, "--train.steps", str(num_steps)), harms.at_random(4, 1.5),
            verdicts.keeps_its_ring(10, _NOTICED_S), num_steps, env={ATTACK: kind}, module="benchmarks.chaos.attacked",
        )
        for suffix, where, launch, num_steps in (
            ("", "", partial(checkout.mpirun, 4), 150),
            ("-hosts", ", 2 hosts x 2 ranks", partial(checkout.cluster, 2, 2), 50),
        )
    ]  # fmt: skip


def _clean(name: str, words: str, launch: Launch, harm: Harmer, verdict: Verdict) -> Case:
    settings = (*_ELASTIC, "--train.steps", "2000", "--checkpoint.every", "500")
    return Case(name, words, launch, 4, settings, harm, verdict, 2000, seconds=1200.0, needs_reference=False)


_random = harms.at_random

CASES: Sequence[Case] = (
    _in_place("kill", "kill -9 of a random rank, 4 ranks", 4, _random(4, _SECONDS)),
    _in_place("kill-hosts", "the same on 2 hosts x 2 ranks", (2, 2), _random(4, _SECONDS)),
    _in_place(
        "kill-uneven", "the same with batch 8, so 3 ranks take 3, 3 and 2 sequences", 4, _random(4, _SECONDS), "--train.batch", "8"
    ),
    _in_place(
        "kill-101m", "101 M parameters, ZeRO-3, 3 ranks", 3, _random(3, 14.0), "--train.batch", "3",
        base=_LARGE, num_steps=14, max_repeated=5,
    ),
    _in_place(
        "kill-101m-tp", "101 M parameters, tp=2 x dp_shard=2, one rank lost", 4, _random(4, 11.0), "--train.batch", "2",
        "--parallel.tensor", "2", base=_LARGE, num_steps=14, max_repeated=5,
    ),
    _in_place("two", "two ranks lost within 0.3 s", 4, _random(4, _SECONDS, pause_s=0.3)),
    _in_place("rank-0", "rank 0 lost", 4, _random(4, _SECONDS, victim=0)),
    _in_place("recovery", "a rank lost during a recovery", 4, _random(4, _SECONDS, pause_s=0.6, during=harms.is_recovering)),
    _in_place(
        "save", "a rank lost during a save", 4, harms.when(harms.is_saving, 4, 0.04), "--checkpoint.every", "7"
    ),
    _in_place(
        "evaluation", "a rank lost during an evaluation", 4, harms.when(harms.is_evaluating, 4, 0.3),
        "--train.eval_every", "10", "--train.eval_batches", "20",
    ),
    _host("host", "a host of 2 lost, relaunch on the other", cut=False),
    _host("link", "the link of a host cut, with both sides alive, relaunch on the other", cut=True),
    *_stuck("sleep", "a rank that sleeps"),
    *_stuck("stop", "a rank that is stopped"),
    *_stuck("gil", "a rank that holds the GIL"),
    *_stuck("skip", "a rank that comes to another collective"),
    *_stuck("io", "a rank that waits in I/O"),
    _left_behind("sleep", "a rank that sleeps"),
    _left_behind("stop", "a rank that is stopped"),
    _left_behind("gil", "a rank that holds the GIL"),
    *_attacked("first", "connects to each rank first"),
    *_attacked("many", "opens 200 connections to each rank"),
    *_attacked("half", "sends half a hello to each rank"),
    *_attacked("replay", "replays what a rank has sent to another one"),
    *_attacked("length", "sends 2^63 as each length"),
    _ends("mpirun", "mpirun killed, the same command again", harms.launcher(SIGKILL, seconds=_SECONDS)),
    _ends("mpirun-elastic", "the same, an elastic run", harms.launcher(SIGKILL, seconds=_SECONDS), elastic=True),
    _ends("sigterm", "mpirun gets SIGTERM", harms.launcher(SIGTERM, seconds=_SECONDS)),
    _ends("ctrl-c", "mpirun gets SIGINT twice", harms.launcher(SIGINT, SIGINT, seconds=_SECONDS, apart_s=0.2)),
    _disk_full("disk", "the disk full during a save"),
    _flipped(
        "flip-replicated", "a bit flipped in replicated parameters, 3 ranks", 3, 10,
        "--parallel.stage", "0", "--train.batch", "3",
    ),
    _flipped("flip-shard", "a bit flipped in a shard before a checked step, 2 ranks", 2, 1),
    _slow("slow-sleep", "blocked", "a rank slowed to 1.4 times by sleep, 2 ranks"),
    _slow("slow-neighbour", "cpu", "a rank slowed to 1.4 times by a busy process on its core, 2 ranks"),
    _slow("slow-data", "data", "a rank slowed to 1.4 times by slow data, 2 ranks"),
    _clean(
        "clean", "false alarms in 2,000 clean steps, 4 ranks", partial(checkout.mpirun, 4), harms.nothing, verdicts.is_silent
    ),
    _clean(
        "clean-hosts", "the same on 2 hosts x 2 ranks, with copies between the hosts", partial(checkout.cluster, 2, 2),
        harms.nothing, verdicts.is_silent,
    ),
    _clean(
        "clean-busy", "the same as the first with another process on one core", partial(checkout.mpirun, 4), harms.busy_core,
        verdicts.names_stragglers_alone,
    ),
)  # fmt: skip

BY_NAME: Mapping[str, Case] = {case.name: case for case in CASES}
