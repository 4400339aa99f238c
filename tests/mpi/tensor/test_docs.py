"""The programs in docs/parallel.md and docs/pipelines.md run."""

import re
from pathlib import Path

import pytest
import torch
from tiny_transformers import tiny

from collectives import Communicator

DOCS = Path(__file__).resolve().parents[3] / "docs"
PROGRAMS = [
    (page, program)
    for page in ("parallel.md", "pipelines.md")
    for program in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
]


@pytest.mark.rest
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_runs(comm: Communicator, shared_tmp: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.chdir(shared_tmp)
    page, program = PROGRAMS[number]
    if "pp=2, tp=2" in program and comm.size < 4:
        pytest.skip("needs four ranks")
    if "transformers" in program:
        pytest.importorskip("transformers", minversion="5")
        if comm.rank == 0:
            tiny("llama").save_pretrained("Llama")
        comm.barrier()
    names: dict[str, object] = {}
    exec(compile(program, page, "exec"), names)
    if "loss" in program:  # not one that only makes groups
        loss = torch.as_tensor(names["loss"])
        assert loss.isfinite(), loss
    names["mesh"].free()  # type: ignore[attr-defined]


def test_there_are_programs() -> None:
    assert len(PROGRAMS) == 11
