"""The words of a command `mpirun ... python -m mpitrain ...`: what they say, and the same command for other hosts. Pure, except that
hostfiles and settings files are read."""

import functools
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mpitrain.files import no_code, read_named, toml_of
from mpitrain.job.elastic.supervisor.hosts import Host, as_list, parse_file, parse_list

Kind = Literal["openmpi", "mpich", "srun", "other"]
"""The family of the launcher. srun is known within a job of Slurm. Of another one (a script) the supervisor knows neither hosts nor
numbers of ranks."""

_ON_EVENT = "log.on_event"
_NUMBER = {"np", "n", "c"}
_HOSTS = {"H", "host", "hosts"}
_HOST_FILE = {"hostfile", "machinefile", "f", "default-hostfile"}
_TWO_VALUES = {"mca", "omca", "gmca", "pmixmca", "gpmixmca", "prtemca", "genv", "env"}
_ONE_VALUE = {
    *("x", "wdir", "wd", "path", "prefix", "map-by", "rank-by", "bind-to", "timeout", "output", "launcher", "launcher-exec"),
    *("with-ft", "ppn", "rr", "genvlist", "envlist", "app", "tune", "am", "personality", "runtime-options", "display", "npernode"),
    *("N", "npersocket", "pernode", "cpu-set", "report-state-on-timeout", "launch-agent", "rmk", "iface", "bootstrap", "stdin"),
    *("bootstrap-exec", "configfile", "max-restarts", "pset", "xterm", "mem", "cpus-per-rank", "show-progress", "output-filename"),
}  # fmt: skip
_NO_VALUE = {"pernode", "show-progress", "report-state-on-timeout"}


@dataclass(frozen=True)
class Command:
    """A command in its parts: launcher, options of the launcher less those for hosts and ranks, and the program with its arguments."""

    launcher: str
    kind: Kind
    options: tuple[str, ...]
    program: tuple[str, ...]
    hosts: tuple[Host, ...] = ()
    ranks: int | None = None
    given: tuple[str, ...] = ()
    """The options of the launcher as they were given: so are they used as long as the hosts are the given ones."""
    most: int | None = None
    """The number of hosts that the command takes of those, if it says so."""

    def on(self, hosts: Sequence[Host], ranks: int | None) -> "Command":
        """The command on these hosts alone."""
        if self.kind == "other":
            return self
        if self.kind == "srun":
            num = sum(host.slots for host in hosts) if ranks is None else ranks
            words = [f"--nodes={len(hosts)}", f"--nodelist={','.join(host.name for host in hosts)}", f"--ntasks={num}"]
            if {host.slots * len(hosts) for host in hosts} == {num}:
                words.append(f"--ntasks-per-node={num // len(hosts)}")
            return replace(self, given=(*words, *self.options))
        words = ["-H" if self.kind == "openmpi" else "-hosts", as_list(hosts)]
        if ranks is not None:
            words += ["-np", str(ranks)]
        return replace(self, given=(*words, *self.options))

    def with_options(self, *options: str) -> "Command":
        """The command with further options of the launcher."""
        return replace(self, given=(*options, *self.given), options=(*options, *self.options))

    def resumed_from(self, start: str) -> "Command":
        """The command with another start; the last of repeated settings counts."""
        return replace(self, program=(*self.program, "--resume", start))

    def words(self) -> list[str]:
        """All words, as for a process."""
        return [self.launcher, *self.given, *self.program]

    def option(self, *names: str) -> str | None:
        """The last value of an option such as `--mca NAME VALUE` (two values) or `-launcher-exec VALUE`."""
        found = None
        for index, word in enumerate(self.options):
            flag, equals, value = word.partition("=")
            if flag in names and (equals or index + 1 < len(self.options)):
                found = value if equals else self.options[index + 1]
        return found


def parse(words: Sequence[str], kind: Kind) -> Command:
    """The parts of a command. ValueError if the hosts are named wrongly, or a hostfile cannot be read."""
    if kind == "other":
        return Command(words[0], kind, (), tuple(words[1:]))
    options: list[str] = []
    hosts: list[Host] = []
    ranks: int | None = None
    at = 1
    while at < len(words) and words[at].startswith("-"):
        name, equals, value = words[at].lstrip("-").partition("=")
        num = 0 if equals or name in _NO_VALUE else 2 if name in _TWO_VALUES else 1
        if not equals and name not in _NUMBER | _HOSTS | _HOST_FILE | _TWO_VALUES | _ONE_VALUE:
            num = 0
        here, at = list(words[at : at + 1 + num]), at + 1 + num
        value = value if equals else here[-1]
        if name in _NUMBER:
            if not value.isdigit() or int(value) < 1:
                raise ValueError(f"{here[0]}: expected a number of ranks from 1, got {value!r}")
            ranks = int(value)
        elif name in _HOSTS:
            hosts += parse_list(value)
        elif name in _HOST_FILE:
            try:
                hosts += parse_file(Path(value).read_text())
            except OSError as error:
                raise ValueError(f"{here[0]} {value}: {error.strerror}") from None
        else:
            options += here
    if at >= len(words):
        raise ValueError("expected a program after the options of mpirun, such as python -m mpitrain, got nothing")
    if hosts and ":" in words[at:]:
        raise ValueError("expected one program, got several parts joined by ':': the hosts of each part are not known")
    return Command(words[0], kind, tuple(options), tuple(words[at:]), tuple(hosts), ranks, tuple(words[1:at]))


def run_folder(words: Sequence[str]) -> Path:
    """The folder of the run that a command trains, from its `--run` and `--config`; ValueError if the settings file cannot be read."""
    run = setting(words, "run")
    return Path(run or _of_file(words).get("run") or "runs/default")


def resume_of(words: Sequence[str]) -> str:
    """The setting `resume` of a command: auto, never, or a checkpoint."""
    return setting(words, "resume") or _of_file(words).get("resume") or "auto"


def on_event_of(words: Sequence[str]) -> str | None:
    """The setting `log.on_event` of a command. It is not taken from the run's folder, which others may have written.

    ValueError if it stands in a file that others could have written.
    """
    command = setting(words, _ON_EVENT)
    if command is None:
        settings, reason = _read_file(words)
        command = settings.get(_ON_EVENT)
        if command is not None and reason:
            raise ValueError(no_code(_ON_EVENT, setting(words, "config") or "", reason))
    return None if command is None or command.lower() == "none" else command


def setting(words: Sequence[str], name: str) -> str | None:
    """The last value of `--name VALUE` or `--name=VALUE`, with - or _ within the name."""
    found = None
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag[2:].replace("-", "_") == name:
            if equals:
                found = value
            elif index + 1 < len(words):
                found = words[index + 1]
    return found


def agent_of(command: Command, environ: Mapping[str, str]) -> str:
    """The words by which the launcher reaches hosts, ssh unless it was told otherwise."""
    if command.kind == "mpich":
        named = command.option("-launcher-exec", "-bootstrap-exec") or environ.get("HYDRA_LAUNCHER_EXEC")
    else:
        named = command.option("plm_rsh_agent", "plm_ssh_agent")
        for variable in ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"):
            named = named or environ.get(variable)
    return (named or "ssh").partition(":")[0].strip()  # "ssh : rsh" are alternatives


def _of_file(words: Sequence[str]) -> dict[str, str]:
    """The settings that are texts, by full name, of the file in `--config`."""
    return _read_file(words)[0]


def _read_file(words: Sequence[str]) -> tuple[dict[str, str], str]:
    """The settings that are texts, by full name, of the file in `--config`, and who else could have written it; see `read_named`."""
    file = setting(words, "config")
    return ({}, "") if file is None else _read_once(os.path.abspath(file))


@functools.cache
def _read_once(file: str) -> tuple[dict[str, str], str]:
    """The settings as they are at the first call. ValueError for a pipe, which can be read only once, and each launch reads it."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise ValueError("expected a regular file, because each launch reads it, got a folder, pipe or device")
        text, reason = read_named(file)
        settings = toml_of(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"settings file {file}: {error}") from None
    sections = {name: its for name, its in settings.items() if isinstance(its, dict)}
    named = settings | {f"{section}.{name}": value for section, its in sections.items() for name, value in its.items()}
    return {name: value for name, value in named.items() if isinstance(value, str)}, reason
