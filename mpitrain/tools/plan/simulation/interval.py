"""The best time between two checkpoints: by formulas, and by trying many on the same failures."""

from math import inf, sqrt
from typing import NamedTuple

import numpy as np

_FAILURES = 20_000  # of which each candidate sees the same


class Interval(NamedTuple):
    """The time of training between two checkpoints, in seconds; all are infinite without failures."""

    young_s: float
    daly_s: float
    simulated_s: float
    """The best of the candidates, each a whole number of steps."""
    simulated_goodput: float
    """The share of the time that goes into steps that are not lost, with the best."""


def young_s(checkpoint_s: float, mtbf_s: float) -> float:
    """The first-order optimum sqrt(2 x cost x MTBF) (Young 1974, Communications of the ACM 17(9))."""
    return sqrt(2 * checkpoint_s * mtbf_s)


def daly_s(checkpoint_s: float, mtbf_s: float) -> float:
    """The higher-order optimum (Daly 2006, Future Generation Computer Systems 22(3))."""
    if mtbf_s == inf:
        return inf
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2 * mtbf_s)
    return young_s(checkpoint_s, mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def expected_goodput(interval_s: float, *, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """The share of the time that goes into steps that are not lost (Daly 2006, for exponential failures)."""
    if mtbf_s == inf:
        return interval_s / (interval_s + checkpoint_s)
    # A failure may hit a restart as well. Each is followed by a restart, and by the whole interval.
    with np.errstate(over="ignore"):  # a machine that hardly ever lasts so long has a goodput of 0
        lasts = mtbf_s * np.exp(restart_s / mtbf_s) * np.expm1((interval_s + checkpoint_s) / mtbf_s)
    return float(interval_s / lasts)


def best_interval(step_s: float, *, checkpoint_s: float, restart_s: float, mtbf_s: float, seed: int) -> Interval:
    """Try intervals from an eighth to eight times Young's, of whole steps of `step_s` seconds."""
    if mtbf_s == inf:
        return Interval(inf, inf, inf, 1.0)
    young = young_s(checkpoint_s, mtbf_s)
    most = max(young, step_s) * 8
    gaps = mtbf_s * np.random.default_rng([seed, 4]).standard_exponential(_FAILURES)
    steps = np.unique(np.rint(np.geomspace(max(young / 8, step_s), most, 97) / step_s).astype(int))
    goodputs = [
        sampled_goodput(int(k), gaps, step_s=step_s, checkpoint_s=checkpoint_s, restart_s=restart_s) for k in steps
    ]
    best = int(np.argmax(goodputs))
    return Interval(young, daly_s(checkpoint_s, mtbf_s), float(steps[best] * step_s), float(goodputs[best]))


def sampled_goodput(steps: int, gaps: np.ndarray, *, step_s: float, checkpoint_s: float, restart_s: float) -> float:
    """The share of the time that goes into steps that are not lost. `gaps`: seconds from each failure to the next, float64 (n,)."""
    training = np.maximum(gaps - restart_s, 0)
    saved = training // (steps * step_s + checkpoint_s)
    return float(saved.sum() * steps * step_s / gaps.sum())
