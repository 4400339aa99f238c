"""Commands on the hosts of a job, by the means of its launcher: ssh or what replaces it, srun in Slurm, pbsdsh in PBS.

One short command for each host does three things at once: its answer shows that the host lives, it ends the processes that an earlier
launch has left there, and it removes the folder of that launch's mpirun.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from mpitrain.job.elastic.supervisor.hosts import is_own
from mpitrain.job.elastic.supervisor.mpi_files.sessions import CleanedFolders, SessionFolder, script
from mpitrain.job.record.files.marks import SUPERVISOR_VARIABLE

SWEEP = r"""
begun() { stat=$(cat "/proc/$1/stat" 2>/dev/null) && set -- ${stat##*) } && echo "${20}"; }
for round in 1 2 3 4 5 6; do
    found=$(grep -lsxz "$mark" /proc/[0-9]*/environ || true) # grep fails too if a process has just ended
    [ -n "$found" ] && [ "$round" != 6 ] || break
    for file in $found; do
        pid=${file#/proc/} && pid=${pid%/environ}
        start=$(begun "$pid")
        grep -qsxz "$mark" "$file" && [ -n "$start" ] && [ "$start" = "$(begun "$pid")" ] && kill -9 "$pid" && num=$((num + 1))
    done 2>/dev/null
    sleep 0.1
done
"""
"""Ends all processes with the line `mark` in their environment. The start time before and after the look at the environment shows that
the process id is still the same process's."""
_BEGIN = "num=0 removed= kept=\n"
"""Variables of these names in a user's environment must not get into the answer."""
_ANSWER = 'echo "ended $num removed$removed kept$kept"\n'
_ANSWERED = re.compile(r"^ended (\d+) removed((?: \d+)*) kept((?: \d+)*)\s*$", re.MULTILINE)


class Answer(NamedTuple):
    """What was found on a host: the number of processes ended, and the folders of mpirun."""

    ended: int
    folders: CleanedFolders = CleanedFolders()


class Agent(NamedTuple):
    """Words that run a command on a host. `{host}` and `{index}` (of the host in the list) are replaced in them."""

    words: tuple[str, ...]
    joins: bool
    """whether the words of the command are joined for a shell on the host, as by ssh"""

    def command(self, host: str, index: int, script: str) -> list[str]:
        """The words that run a shell script on the host."""
        if is_own(host):
            return ["sh", "-c", script]
        words = [word.replace("{host}", host).replace("{index}", str(index)) for word in self.words]
        return [*words, f"sh -c {shlex.quote(script)}"] if self.joins else [*words, "sh", "-c", script]


def parse_agent(text: str) -> Agent:
    """The agent that a user has named: words such as "ssh -p 2222", to which the host is added unless they have {host} or {index}."""
    words = shlex.split(text)
    if not words:
        raise ValueError("expected the words of a command that reaches a host, such as 'ssh -p 2222', got nothing")
    if words == ["ssh"]:
        words += ["-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new"]
    joins = words[0].rpartition("/")[2] not in ("srun", "pbsdsh")
    return Agent(tuple(words if re.search(r"{host}|{index}", text) else [*words, "{host}"]), joins)


def choose_agent(of_launcher: str, environ: Mapping[str, str]) -> Agent:
    """The agent of the batch system that this process is in, else the launcher's own."""
    if environ.get("SLURM_JOB_ID") and shutil.which("srun"):
        return parse_agent("srun --overlap --quiet --nodes=1 --ntasks=1 --nodelist={host}")
    if environ.get("PBS_NODEFILE") and shutil.which("pbsdsh"):
        return parse_agent("pbsdsh -n {index} --")
    return parse_agent(of_launcher)


def sweep(
    agent: Agent,
    hosts: Sequence[str],
    supervisor: str,
    sessions: Sequence[SessionFolder],
    timeout_s: float,
    indices: Mapping[str, int],
) -> dict[str, Answer]:
    """End what earlier launches of this supervisor have left on each host, and on this one, and remove their folders. Returns the
    answers of the hosts that gave one in time. `indices`: of the hosts in the batch system's list."""
    mark = f"mark={shlex.quote(f'{SUPERVISOR_VARIABLE}={supervisor}')}\n{SWEEP}"
    scripts = {host: mark + script(sessions, host) for host in _with_this(hosts)}
    return _everywhere(agent, scripts, timeout_s, indices)


def clean(
    agent: Agent, hosts: Sequence[str], sessions: Sequence[SessionFolder], timeout_s: float, indices: Mapping[str, int]
) -> dict[str, Answer]:
    """Remove the folders of launches that have ended by themselves, on each host and on this one."""
    return _everywhere(agent, {host: script(sessions, host) for host in _with_this(hosts)}, timeout_s, indices)


def probe(agent: Agent, hosts: Sequence[str], timeout_s: float, indices: Mapping[str, int]) -> list[str]:
    """The hosts that answer in time. Ends nothing."""
    return list(_everywhere(agent, dict.fromkeys(hosts, ""), timeout_s, indices))


def count(
    agent: Agent, hosts: Sequence[str], text: str, timeout_s: float, indices: Mapping[str, int]
) -> dict[str, int]:
    """Run a shell script that counts in $num on each host, and on this one. The numbers of the hosts that answered in time."""
    answers = _everywhere(agent, dict.fromkeys(_with_this(hosts), text), timeout_s, indices)
    return {host: answer.ended for host, answer in answers.items()}


def _with_this(hosts: Sequence[str]) -> list[str]:
    """The hosts, with this one first."""
    here = next((host for host in hosts if is_own(host)), "localhost")
    return list(dict.fromkeys([here, *hosts]))


def _everywhere(
    agent: Agent, scripts: Mapping[str, str], timeout_s: float, indices: Mapping[str, int]
) -> dict[str, Answer]:
    with ThreadPoolExecutor(min(64, len(scripts)), "mpitrain-agent") as pool:
        commands = [
            agent.command(host, indices.get(host, 0), _BEGIN + text + _ANSWER) for host, text in scripts.items()
        ]
        answers = dict(zip(scripts, pool.map(lambda command: _answer(command, timeout_s), commands), strict=True))
    found = {host: _ANSWERED.search(text) for host, text in answers.items()}
    return {
        host: Answer(int(match[1]), CleanedFolders(*(frozenset(map(int, match[group].split())) for group in (2, 3))))
        for host, match in found.items()
        if match is not None
    }


def _answer(command: list[str], timeout_s: float) -> str:
    """What a command prints if it succeeds in time, else ""."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError:
        return ""
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        return ""
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
