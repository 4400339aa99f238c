"""The rows of the table: what is done to which job."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mpitrain.chaos import checkout
from mpitrain.chaos.trial import Harmer, at_random, is_evaluating, is_saving, when

_SHORT = ("--train.sample_bytes", "0", "--train.eval_batches", "0", "--train.elastic", "true")
_TINY = (*_SHORT, "--train.steps", "60")
_SECONDS = 5.0  # of the steps of the tiny model
_MODEL_101M = ("--model.width", "768", "--model.layers", "14", "--model.heads", "12", "--model.context", "128")
_LARGE = (*_SHORT, *_MODEL_101M, "--train.steps", "14", "--train.copy_every", "5")

Launch = Callable[[], tuple[tuple[str, ...], dict[str, str]]]


class Case(NamedTuple):
    """A row of the table. `goal`: the asked median and 95th percentile of the time to the end of the first step."""

    name: str
    words: str
    launch: Launch
    settings: tuple[str, ...]
    harm: Harmer
    max_repeated: int = 10
    goal: tuple[float, float] | None = None


def _on(num_ranks: int) -> Launch:
    return lambda: checkout.mpirun(num_ranks)


def _hosts() -> tuple[tuple[str, ...], dict[str, str]]:
    return checkout.cluster(2, 2)


CASES: Sequence[Case] = (
    Case("kill", "kill -9 of a random rank, 4 ranks", _on(4), _TINY, at_random(4, _SECONDS), goal=(1.0, 3.0)),
    Case(
        "kill-hosts", "the same on 2 hosts x 2 ranks", _hosts, _TINY, at_random(4, _SECONDS), goal=(2.0, 5.0)
    ),
    Case(
        "kill-uneven", "the same with batch 8, so 3 ranks take 3, 3 and 2 sequences", _on(4),
        (*_TINY, "--train.batch", "8"), at_random(4, 4.0), goal=(1.0, 3.0),
    ),
    Case(
        "kill-101m", "101 M parameters, ZeRO-3, 3 ranks", _on(3), (*_LARGE, "--train.batch", "3"), at_random(3, 12.0),
        goal=(4.0, 15.0), max_repeated=5,
    ),
    Case(
        "kill-101m-tp", "101 M parameters, tp=2 x dp_shard=2, one rank lost", _on(4),
        (*_LARGE, "--train.batch", "2", "--parallel.tensor", "2"), at_random(4, 8.0), goal=(4.0, 15.0), max_repeated=5,
    ),
    Case("two", "two ranks lost within 0.3 s", _on(4), _TINY, at_random(4, _SECONDS, pause_s=0.3)),
    Case("rank-0", "rank 0 lost", _on(4), _TINY, at_random(4, _SECONDS, victim=0)),
    Case("recovery", "a rank lost during a recovery", _on(4), _TINY, at_random(4, 4.0, pause_s=0.6)),
    Case(
        "save", "a rank lost during a save", _on(4), (*_TINY, "--checkpoint.every", "7"), when(is_saving, 4, 0.05)
    ),
    Case(
        "evaluation", "a rank lost during an evaluation", _on(4),
        (*_TINY, "--train.eval_every", "10", "--train.eval_batches", "20"), when(is_evaluating, 4, 0.3),
    ),
)  # fmt: skip

BY_NAME: Mapping[str, Case] = {case.name: case for case in CASES}
