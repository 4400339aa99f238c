"""Judges what lies between hosts: clocks, links, TCP ports. Pure: facts in, findings out."""

from collections.abc import Mapping, Sequence
from statistics import median

from collectives.shared.units import show_seconds
from mpitrain.tools.doctor.findings import Finding, Level, names, ok
from mpitrain.tools.doctor.network import Clock, NetworkLink, Reach

_SLOW_LINK = 0.05e9  # bytes/s: a link of 1 Gbit/s has 0.117e9
_OUTLIER = 0.5  # of the median of the other links
_CLOCK_NOTE_S, _CLOCK_WARNING_S = 0.1, 1.0


def judge_clocks(facts: Mapping[str, Clock]) -> list[Finding]:
    """The clocks of all hosts against rank 0's."""
    if len(facts) < 2:
        return []
    place, worst = max(facts.items(), key=lambda item: abs(item[1].ahead_s))
    within = show_seconds(max(its.half_trip_s for its in facts.values()))
    distance = f"{show_seconds(abs(worst.ahead_s))} {'ahead of' if worst.ahead_s > 0 else 'behind'} {next(iter(facts))}"
    if abs(worst.ahead_s) < max(_CLOCK_NOTE_S, 2 * worst.half_trip_s):
        return [ok("clocks", f"at most {show_seconds(abs(worst.ahead_s))} apart on {len(facts)} hosts (± {within})")]
    level = Level.WARNING if abs(worst.ahead_s) >= _CLOCK_WARNING_S else Level.NOTE
    return [
        Finding(
            level,
            "clocks",
            f"the clock is {distance} (± {within}); times in logs, and ages of files, mislead",
            f"less than {show_seconds(_CLOCK_NOTE_S)}",
            f"start a time service on {place}: chronyc makestep, or timedatectl set-ntp true",
            where=place,
        )
    ]


def judge_links(links: Sequence[NetworkLink]) -> list[Finding]:
    """The links between hosts and within them, by their own speed and against each other."""
    findings = []
    for topic, its in (
        ("between hosts", [link for link in links if _host(link.source) != _host(link.target)]),
        ("within a node", [link for link in links if _host(link.source) == _host(link.target)]),
    ):
        if not its:
            continue
        slowest = min(its, key=lambda link: link.bytes_per_s)
        typical = median(link.bytes_per_s for link in its)
        said = f"{_speed(slowest)} from {slowest.source} to {slowest.target}"
        number = f" (the slowest of {len(its)}, median {typical / 1e9:.3g} GB/s)" if len(its) > 1 else ""
        if slowest.bytes_per_s < _SLOW_LINK:
            findings.append(
                Finding(
                    Level.WARNING,
                    topic,
                    said + number,
                    f"more than {_SLOW_LINK / 1e9:g} GB/s (a link of 1 Gbit/s has 0.12 GB/s)",
                    "see which interface MPI uses (--mca btl_tcp_if_include NAME, UCX_NET_DEVICES), and that no other job uses it"
                    if topic == "between hosts"
                    else "see the findings of cores: ranks on one core wait for each other",
                )
            )
        elif len(its) > 2 and slowest.bytes_per_s < _OUTLIER * typical:
            findings.append(
                Finding(
                    Level.WARNING,
                    topic,
                    said + number,
                    "links of similar speed",
                    f"look at the cable, switch port and other load of {slowest.source} and {slowest.target}",
                )
            )
        else:
            findings.append(ok(topic, said + number))
    return findings


def _host(place: str) -> str:
    return place.rpartition(" on ")[2]


def _speed(link: NetworkLink) -> str:
    return f"{link.bytes_per_s / 1e9:.3g} GB/s, {show_seconds(link.latency_s)}"


def judge_ports(reaches: Sequence[Reach]) -> list[Finding]:
    """TCP connections between hosts, which the monitors of ranks use."""
    if not reaches:
        return []
    closed = [reach for reach in reaches if not reach.works]
    if not closed:
        return [ok("TCP ports", f"{len(reaches)} connections between hosts to a free port work")]
    pairs = names([f"{_host(reach.source)} to {_host(reach.target)}" for reach in closed])
    tried = ", ".join(closed[0].tried) or "no address but 127.0.0.1"
    return [
        Finding(
            Level.ERROR,
            "TCP ports",
            f"no connection from {pairs} ({len(closed)} of {len(reaches)} fail; tried {tried})",
            "each host reaches all TCP ports of the others from 1024 on",
            "open them between the hosts of the job (firewall-cmd --zone=trusted --add-source=NETWORK, a network policy); "
            "without them the death of a host is noticed late",
        )
    ]
