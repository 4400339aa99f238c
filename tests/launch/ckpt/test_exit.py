"""A program that ends right after it began to save in the background: the save comes to its end, or the exit code tells."""

from pathlib import Path

import pytest
from launching import ROOT, launch

import ckpt

pytestmark = pytest.mark.rest

PROGRAM = """
import resource, sys
import numpy as np
import ckpt, collectives

comm = collectives.world()
folder, ending = sys.argv[1:]
if ending == "fails":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
tensors = {"a": np.full((2000, 1000), 7, np.float32), "b": np.arange(1_000_000)}
ckpt.save(f"{folder}/step-1", tensors, comm=comm, background=True, copies=[f"{folder}/copy"])
print("the last line", flush=True)
if ending == "exits":
    sys.exit()
"""


@pytest.mark.parametrize("ending", ["ends", "exits", "fails"])
def test_the_end_of_a_program_waits_for_its_save(tmp_path: Path, ending: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    result = launch(2, str(script), str(folder), ending, env={"PYTHONPATH": str(ROOT)}, timeout_s=60)
    assert result.stdout.count("the last line") == 2, str(result)
    if ending == "fails":
        assert result.returncode == 1, str(result)
        assert "ckpt.save in the background failed" in result.stderr and "File too large" in result.stderr, str(result)
        assert [path.name for path in folder.iterdir() if not path.name.endswith(".board")] == [], str(result)
    else:
        assert result.returncode == 0, str(result)
        assert sorted(path.name for path in folder.iterdir()) == ["copy", "latest", "step-1"]
        assert not ckpt.verify(folder / "step-1") and not ckpt.verify(folder / "copy" / "step-1")
