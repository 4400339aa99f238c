"""`python -m mpitrain bench clocks`: how well traces align the clocks of hosts, with clocks that are wrong on purpose."""

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np

from collectives import Communicator
from mpitrain.job.record.trace.clocks import EVERY_S, Clocks, Line, this_host

LIMIT_S = 100e-6
"""The largest error that the bench accepts, beside half the shortest round trip."""


def main(words: Sequence[str], comm: Communicator) -> None:
    """Measure, and print on rank 0. RuntimeError on all ranks if an error is too large; ValueError on one host, which has one clock."""
    with comm.together():
        options = _parse(words)
    place = this_host()
    hosts = comm.all_gather_object(place)
    number = sorted(set(hosts), key=hosts.index).index(place)
    zero = time.monotonic()

    def wrong(time_s: float) -> float:
        return time_s + number * (options.offset + options.ppm * 1e-6 * (time_s - zero))

    clocks = Clocks(comm, wrong)
    with comm.together():
        if len(set(hosts)) == 1:
            raise ValueError(
                "bench clocks: all ranks are on one host, which has one clock; expected ranks on several hosts"
            )
    while comm.broadcast_object(time.monotonic() - zero < 60 * options.minutes):
        clocks.measure()
        time.sleep(min(EVERY_S, 60 * options.minutes / 10))
    clocks.measure()
    line, found = clocks.line(), None
    if hosts.index(place) == comm.rank != 0:
        shares_clock = place[1] == hosts[0][1] != ""  # hosts that are simulated on one machine
        found = _judge(clocks, line, wrong if shares_clock else None)
    lines = [each for each in comm.all_gather_object(found) if each is not None]
    with comm.together():
        if comm.rank == 0:
            what = f"{options.minutes:g} minutes, {options.offset:g} s and {options.ppm:g} ppm of drift injected for each further host"
            print("\n".join([f"{len(lines) + 1} hosts, {what}", *(text for text, _ in lines)]), flush=True)
        if not all(is_good for _, is_good in lines):
            limit = f"{LIMIT_S * 1e6:g} us"
            raise RuntimeError(
                f"bench clocks: expected errors of at most half the shortest round trip, and of at most {limit}"
            )


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mpitrain bench clocks", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: %(default)g)")
    parser.add_argument(
        "--offset", type=float, default=1.0, help="seconds by which each further host is ahead (default: %(default)g)"
    )
    parser.add_argument("--ppm", type=float, default=50.0, help="its drift in millionths (default: %(default)g)")
    return parser.parse_args(words)


def _judge(clocks: Clocks, line: Line, wrong: Callable[[float], float] | None) -> tuple[str, bool]:
    """A line about this host, and whether its error is within the limits. `wrong`: of a host whose true time is rank 0's; else None."""
    host, trips = this_host()[0], [2 * each.error for each in clocks.samples]
    about = (
        f"round trips {min(trips) * 1e6:.1f} us and more (median of the rounds' best {np.median(trips) * 1e6:.1f} us)"
    )
    if wrong is None:  # the truth is unknown
        apart = max(abs(line(each.at) - each.at - each.offset) - each.error for each in clocks.samples)
        return (
            f"{host}: {about}; the line leaves the bound of a round by at most {max(apart, 0) * 1e6:.1f} us",
            apart <= LIMIT_S,
        )
    ends = clocks.samples[0].at, clocks.samples[-1].at
    times = [_when(wrong, shown) for shown in np.linspace(*ends, 1000)]
    errors = np.abs([line(wrong(time_s)) - time_s for time_s in times])
    text = f"{host}: error at most {errors.max() * 1e6:.1f} us, median {np.median(errors) * 1e6:.1f} us; {about}"
    return text, bool(errors.max() <= min(min(trips) / 2, LIMIT_S))


def _when(wrong: Callable[[float], float], shown: float) -> float:
    """The time at which a clock shows `shown`."""
    time_s = shown
    for _ in range(5):
        time_s -= wrong(time_s) - shown
    return time_s
