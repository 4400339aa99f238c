"""What the scripts of mpirun/ ask: python -m mpitrain.job.elastic.supervisor.scripts QUESTION ...

    make MPIRUN                 makes a folder for the files of the next mpirun; prints "DEVICE:INODE FOLDER", nothing if it gets none
    remove DEVICE:INODE FOLDER  removes that folder; prints a line if it stays
    is-elastic ARGUMENTS ...    prints "true" if these arguments of mpitrain ask for train.elastic

All but the last need the standard library alone.
"""

import os
import sys
from collections.abc import Callable

from mpitrain.job.elastic.supervisor.agents import clean, parse_agent
from mpitrain.job.elastic.supervisor.hosts import of_environment
from mpitrain.job.elastic.supervisor.launch.job import launcher_kind
from mpitrain.job.elastic.supervisor.mpi_files.sessions import SessionFolder, Sessions, make
from mpitrain.job.elastic.supervisor.words import Command, setting

_CLEAN_S = 30.0


def _make(mpirun: str) -> str:
    try:
        hosts = [host.name for host in of_environment(os.environ)]
    except ValueError:
        hosts = ["not known"]
    session = make(Command(mpirun, launcher_kind(mpirun, os.environ), (), ()), os.environ, hosts)
    return "" if session is None else f"{session.inode} {session.folder}"


def _remove(inode: str, folder: str) -> str:
    sessions = Sessions()
    sessions.left.append(SessionFolder(folder, inode))
    answers = clean(parse_agent("false"), [], sessions.left, _CLEAN_S, {})
    sessions.settle({host: answer.folders for host, answer in answers.items()})
    return "\n".join(sessions.remaining())


def _is_elastic(*words: str) -> str:
    """Settings that are wrong ask for nothing: the ranks say what is wrong. A pipe can be read once, and is theirs."""
    from mpitrain.job.config import ConfigError, parse

    words = words[words[:1] == ("train",) :]
    file = setting(words, "config")
    if {"-h", "--help"} & set(words) or (file is not None and not os.path.isfile(file)):
        return ""
    try:
        return "true" if parse(words).train.elastic else ""
    except ConfigError:
        return ""


def main(question: str, *words: str) -> None:
    """Answer a question on stdout."""
    answers: dict[str, Callable[..., str]] = {"make": _make, "remove": _remove, "is-elastic": _is_elastic}
    if text := answers[question](*words):
        print(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
