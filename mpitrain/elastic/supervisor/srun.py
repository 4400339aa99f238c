"""The words of a command `srun ... python -m mpitrain ...` within a job of Slurm. Pure, except that Slurm expands lists of hosts.

A job step starts on the hosts of the allocation, less those that srun's own options leave out. So the options for hosts and numbers of
ranks are read here, and replaced once a host is lost. Variables such as SLURM_NTASKS are options too, which those on the command line
replace.
"""

import re
from collections.abc import Callable, Iterator, Sequence

from mpitrain.elastic.supervisor.hosts import Host
from mpitrain.elastic.supervisor.words import Command

_NO_VALUE = {
    *("preserve-env", "hold", "label", "multi-prog", "overcommit", "overlap", "pty", "quit-on-interrupt", "quiet", "reboot", "help"),
    *("oversubscribe", "spread-job", "use-min-nodes", "unbuffered", "verbose", "disable-status", "contiguous", "no-allocate"),
    *("usage", "exact", "resv-ports", "version", "interactive", "external-launcher"),
    # a value only behind =
    *("bcast", "compress", "immediate", "nice", "no-kill", "kill-on-bad-exit", "propagate", "send-libs", "exclusive"),
}  # fmt: skip
_SHORT = {"n": "ntasks", "N": "nodes", "w": "nodelist", "x": "exclude", "r": "relative"}
_PLAIN_FLAGS = "EHOQZXhlsuvV"
_SHORT_FLAGS = _PLAIN_FLAGS + "IKk"  # these have a value only in the same word
_OF_HOSTS = {*_SHORT.values(), "ntasks-per-node"}
Expand = Callable[[str], list[str]]


def parse_srun(words: Sequence[str], allocation: Sequence[Host], expand: Expand) -> Command:
    """The parts of a command. Its hosts are those of the allocation that srun may take.

    `expand`: the names in a list of Slurm such as n[1-3]. ValueError for wrong numbers and hosts, and if no program follows.
    """
    said: dict[str, str] = {}
    options: list[str] = []
    at = 1
    for name, value, num, kept in _options(words):
        if name in _OF_HOSTS:
            said[name] = value
        options += kept
        at += num
    if at >= len(words):
        raise ValueError("expected a program after the options of srun, such as python -m mpitrain, got nothing")
    if ":" in words[at:]:
        raise ValueError("expected one program, got several parts joined by ':': the hosts of each part are not known")
    hosts = _hosts(said, list(allocation), expand)
    ranks = _number(said, "ntasks")
    if per_node := _number(said, "ntasks-per-node"):
        hosts = [Host(host.name, per_node) for host in hosts]
    most = None
    if "nodes" in said:
        match = re.fullmatch(r"(?:(\d+)-)?(\d+)", said["nodes"])
        if match is None or not int(match[2]):
            raise ValueError(f"srun --nodes: expected a number of nodes, such as 2 or 1-2, got {said['nodes']!r}")
        most = int(match[2])
    return Command(
        words[0], "srun", tuple(options), tuple(words[at:]), tuple(hosts), ranks, tuple(words[1:at]), most=most
    )  # fmt: skip


def in_job(command: Command) -> Command:
    """The command within a job that runs for long: its ranks get all variables, and no ended step holds the cores of the next one."""
    names = {word.lstrip("-").partition("=")[0] for word in command.options}
    added = [f"--{name}" for name in ("export=ALL", "overlap") if name.partition("=")[0] not in names]
    if names & {"exact", "exclusive"}:
        added = [word for word in added if word != "--overlap"]
    return command.with_options(*added)


def _options(words: Sequence[str]) -> Iterator[tuple[str, str, int, Sequence[str]]]:
    """Each option in front of the program: its long name where it matters, its value, its number of words, and what of it is not about
    hosts and numbers of ranks."""
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        word, following, flags = words[at], words[at + 1] if at + 1 < len(words) else "", ""
        if word == "--":
            yield "", "", 1, [word]
            return
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            num = 1 if equals or name in _NO_VALUE else 2
        else:
            last = word[1:].lstrip(_PLAIN_FLAGS)  # -uln4: flags, and at last an option with a value
            flags = word.removesuffix(last)[1:]
            letter, value = last[:1], last[1:].removeprefix("=")
            num = 2 if letter and letter not in _SHORT_FLAGS and not value else 1
            name = _SHORT.get(letter, letter)
        kept = words[at : at + num] if name not in _OF_HOSTS else [f"-{flags}"] if flags else []
        yield name, following if num == 2 else value, num, kept
        at += num


def _hosts(said: dict[str, str], hosts: list[Host], expand: Expand) -> list[Host]:
    """Those of the allocation that srun may take, in its order."""
    if relative := _number(said, "relative", least=0):
        hosts = hosts[relative:]
    known = {host.name for host in hosts}
    if named := said.get("nodelist"):
        wanted = expand(named)
        if missing := [name for name in wanted if name not in known]:
            raise ValueError(f"srun --nodelist: {', '.join(missing)} is not among the hosts of this job")
        hosts = [host for host in hosts if host.name in wanted]
    if left_out := said.get("exclude"):
        unwanted = set(expand(left_out))
        hosts = [host for host in hosts if host.name not in unwanted]
    if not hosts:
        raise ValueError("srun: expected at least one host of this job, but its options leave none")
    return hosts


def _number(said: dict[str, str], name: str, *, least: int = 1) -> int | None:
    value = said.get(name)
    if value is None:
        return None
    if not value.isdigit() or int(value) < least:
        raise ValueError(f"srun --{name}: expected a whole number from {least}, got {value!r}")
    return int(value)
