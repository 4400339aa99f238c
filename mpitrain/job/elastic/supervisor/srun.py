"""The words of a command `srun ... python -m mpitrain ...` within a job of Slurm. Pure, except that Slurm expands lists of hosts.

A job step starts on the hosts of the allocation, less those that srun's own options leave out. So the options for hosts and numbers of
ranks are read here, and replaced once a host is lost. Variables such as SLURM_NTASKS are options too, which those on the command line
replace.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mpitrain.job.elastic.supervisor.folder import VARIABLES
from mpitrain.job.elastic.supervisor.hosts import Host
from mpitrain.job.elastic.supervisor.words import Command

_NO_VALUE = {
    *("preserve-env", "hold", "label", "multi-prog", "overcommit", "overlap", "pty", "quit-on-interrupt", "quiet", "reboot", "help"),
    *("oversubscribe", "share", "spread-job", "use-min-nodes", "unbuffered", "verbose", "disable-status", "contiguous", "no-allocate"),
    *("usage", "exact", "whole", "version", "interactive", "external-launcher", "external", "test-only", "stepmgr", "debugger-test"),
    *("wait-for-children", "consolidate-segments", "spread-segments"),
    # a value only behind =
    *("bcast", "compress", "immediate", "nice", "no-kill", "kill-on-bad-exit", "propagate", "send-libs", "exclusive", "x11"),
    *("resv-ports", "oom-kill-step"),
}  # fmt: skip
_VALUE = {
    *("accel-bind", "account", "acctg-freq", "bb", "bbf", "bcast-exclude", "begin", "chdir", "cluster-constraint", "clusters"),
    *("comment", "constraint", "container", "container-id", "core-spec", "cores-per-socket", "cpu-bind", "cpu-freq"),
    *("cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot", "dependency", "distribution", "epilog", "error", "exclude"),
    *("export", "extra", "extra-node-info", "gid", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket"),
    *("gpus-per-task", "gres", "gres-flags", "het-group", "hint", "input", "job-name", "jobid", "licenses", "mail-type"),
    *("mail-user", "max-exit-timeout", "mcs-label", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "mpi"),
    *("mpi-combine", "msg-timeout", "network", "nodelist", "nodes", "ntasks", "ntasks-per-board", "ntasks-per-core"),
    *("ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "open-mode", "output", "partition", "power", "prefer"),
    *("priority", "profile", "prolog", "qos", "relative", "reservation", "segment", "signal", "slurmd-debug"),
    *("sockets-per-node", "switches", "task-epilog", "task-prolog", "tasks-per-node", "thread-spec", "threads"),
    *("threads-per-core", "time", "time-min", "tmp", "tres-bind", "tres-per-task", "treewidth", "uid", "wait", "wckey"),
}  # fmt: skip
_SHORT = {"n": "ntasks", "N": "nodes", "w": "nodelist", "x": "exclude", "r": "relative"}
_SHORT_VALUE = "AbBcCdDeFGiJLmMnNopqrStTwWx"
_PLAIN_FLAGS = "EHOQZXhlsuvV"
_SHORT_FLAGS = _PLAIN_FLAGS + "IKk"  # these have a value only in the same word
_ALIASES = {"tasks-per-node": "ntasks-per-node"}
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
    """The command within a job that runs for long: its ranks get all variables, or those that the user has chosen and the supervisor's,
    and no ended step holds the cores of the next one."""
    return replace(command, given=_in_job(command.given), options=_in_job(command.options))


def _in_job(words: Sequence[str]) -> tuple[str, ...]:
    kept: list[str] = []
    names: set[str] = set()
    at = 0
    for name, value, num, _ in _options(["srun", *words]):
        here, at = words[at : at + num], at + num
        if name == "export" and (exported := _exported(value)) != value:
            here = [f"--export={exported}"]
        kept += here
        names.add(name)
    added = [] if "export" in names else ["--export=ALL"]
    if not names & {"overlap", "exact", "exclusive"}:
        added.append("--overlap")
    return (*added, *kept)


def _exported(value: str) -> str:
    """A value of `--export` that also names the supervisor's variables: without them it would hear nothing of its ranks."""
    names = value.split(",")
    if "ALL" in (name.upper() for name in names):
        return value
    return ",".join([*VARIABLES, *(name for name in names if name.upper() not in ("NONE", "NIL"))])


def _options(words: Sequence[str]) -> Iterator[tuple[str, str, int, Sequence[str]]]:
    """Each option in front of the program: its long name where it matters, its value, its number of words, and what of it is not about
    hosts and numbers of ranks. ValueError if it is not known where the option ends."""
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        word, following, flags = words[at], words[at + 1] if at + 1 < len(words) else "", ""
        if word == "--":
            yield "", "", 1, [word]
            return
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = _full(name)
            takes_next = not equals and _takes_next(word, name in _VALUE, name in _NO_VALUE, following)
        else:
            last = word[1:].lstrip(_PLAIN_FLAGS)  # -uln4: flags, and at last an option with a value
            flags = word.removesuffix(last)[1:]
            letter, value = last[:1], last[1:].removeprefix("=")
            is_flag = not letter or letter in _SHORT_FLAGS
            takes_next = not value and _takes_next(word, letter in _SHORT_VALUE and not is_flag, is_flag, following)
            name = _SHORT.get(letter, letter)
        num = 2 if takes_next else 1
        kept = words[at : at + num] if name not in _OF_HOSTS else [f"-{flags}"] if flags else []
        yield name, following if num == 2 else value, num, kept
        at += num


def _takes_next(word: str, has_value: bool, is_flag: bool, following: str) -> bool:
    """Whether the next word is the value of an option."""
    if has_value or is_flag:
        return has_value
    if following.startswith("-"):
        return False  # no value begins so
    raise ValueError(
        f"srun {word}: it is not known whether {following or 'a next word'} is its value; expected --option=value, or, if it has no "
        "value, a further option behind it"
    )


def _full(name: str) -> str:
    """The full name of an option of srun, which takes the begin of a name for it. One of a plugin of the site stays as it is."""
    known = _VALUE | _NO_VALUE
    found = [name] if name in known else sorted(one for one in known if one.startswith(name))
    if len(found) > 1:
        raise ValueError(f"srun --{name}: expected the whole name of an option, got the begin of {', '.join(found)}")
    full = found[0] if found else name
    return _ALIASES.get(full, full)


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
