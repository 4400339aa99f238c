"""docs/coming.md: its script runs as it is, and the calls that its tables name exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
import collectives
import mpitrain
from collectives import Communicator
from mpitrain.sharding.module import ShardedModule

PAGE = (Path(__file__).parents[3] / "docs/coming.md").read_text()
(SCRIPT,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft asks for it
]


class Program:
    """Runs the script in a folder that all ranks share, as often as a user would. `printed`: by the rank."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._monkeypatch, self._capsys = folder, monkeypatch, capsys
        folder.mkdir(exist_ok=True)

    def __call__(self, *args: str, script: str = SCRIPT) -> dict[str, Any]:
        """Its variables at the end."""
        self._monkeypatch.chdir(self.folder)
        self._monkeypatch.setattr("sys.argv", ["finetune.py", *args])
        variables: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(script, "finetune.py", "exec"), variables)
        self.printed = self._capsys.readouterr().out.splitlines()
        return variables


@pytest.fixture
def program(
    shared_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], comm: Communicator
) -> Program:
    return Program(shared_tmp / "a", monkeypatch, capsys)


@pytest.mark.rest
def test_a_run_that_is_resumed_ends_as_one_that_was_not(
    program: Program, shared_tmp: Path, comm: Communicator, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    import transformers

    whole = program("--steps", "10")
    lines = program.printed
    assert len(lines) == (3 if comm.rank == 0 else 0)
    parts = Program(shared_tmp / "b", monkeypatch, capsys)
    parts("--steps", "5")
    resumed = parts("--steps", "10")
    assert parts.printed == lines[1:], "the same bits, so the same text"
    assert whole["best"] == resumed["best"] < 5 and resumed["data"].step == 10
    files = [shared_tmp / folder / "run/weights/model.safetensors" for folder in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()
    exported = transformers.AutoModelForCausalLM.from_pretrained(files[0].parent)
    answer = exported.generate(input_ids=whole["prompt"], max_new_tokens=16, do_sample=False)
    assert torch.equal(answer, whole["answer"])


@pytest.mark.rest
def test_the_adapter_is_that_of_the_model_that_was_trained(program: Program, comm: Communicator) -> None:
    import peft

    program("--lora", "--steps", "5")
    ends = program("--lora", "--steps", "10")
    assert ends["data"].step == 10
    torch.manual_seed(0)
    base = ends["transformers"].LlamaForCausalLM(ends["config"])
    model = peft.PeftModel.from_pretrained(base, program.folder / "run-lora/adapter")
    rows = ends["held_out"]
    with torch.no_grad():
        held = model(input_ids=rows, labels=rows).loss.item()
        with model.disable_adapter():
            of_base = model(input_ids=rows, labels=rows).loss.item()
    assert held == pytest.approx(ends["held"], rel=1e-5) and held < 0.999 * of_base
    newest = ckpt.latest(program.folder / "run-lora/checkpoints")
    assert newest is not None
    names = [name for name in ckpt.open(newest) if name.startswith("model/")]
    assert len(names) == 8 and all("lora_" in name for name in names), "the base is in no checkpoint"


@pytest.mark.rest
def test_all_ranks_stop_early_together(program: Program, comm: Communicator) -> None:
    ends = program("--lora", script=SCRIPT.replace("lr=3e-3", "lr=0.0"))
    assert comm.all_gather_object((ends["data"].step, ends["num_worse"])) == [(20, 3)] * 2, "of 40 steps"


def test_the_calls_of_the_page_exist(comm: Communicator) -> None:
    tables = [row.split(" | ")[1] for row in re.findall(r"^\| (.*) \|$", PAGE, re.MULTILINE) if " | " in row]
    assert len(tables) > 45
    things = {"mpitrain": mpitrain, "collectives": collectives, "ckpt": ckpt, "comm": comm, "model": ShardedModule}
    for thing, name in re.findall(r"\b(\w+)\.([A-Za-z_]\w*)\(", "\n".join([*tables, SCRIPT])):
        if thing in things and not (thing == "model" and name in ("generate", "save_pretrained")):
            assert hasattr(things[thing], name), f"{thing}.{name}"
