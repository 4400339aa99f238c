"""The main job's AdamW and SGD: the numbers of torch's. All its optimizers: without torch's compiler."""

import subprocess
import sys
from pathlib import Path

import torch

from mpitrain.optim.adamw import AdamW
from mpitrain.optim.sgd import SGD

ROOT = Path(__file__).parents[3]


def trained(kind: type[torch.optim.Optimizer]) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 5)
    optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.1, fused=True)  # type: ignore[call-arg]
    seen: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(3, 7)).square().sum().backward()
        optimizer.step()
    assert len(seen) == 3, "the hooks of torch.optim.Optimizer are called"
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def test_the_numbers_are_those_of_torch() -> None:
    assert torch.equal(trained(AdamW), trained(torch.optim.AdamW))
    assert torch.equal(trained(SGD), trained(torch.optim.SGD))
    assert (AdamW.__name__, SGD.__name__) == ("AdamW", "SGD"), "checkpoints have the name of the optimizer"


def test_the_main_job_does_not_import_the_compiler(tmp_path: Path) -> None:
    """It takes as long as the import of torch itself. Models without a value on the meta device, and a step, are what needs it."""
    words = ["--train.steps", "1", "--model.width", "48", "--model.layers", "1", "--train.eval-batches", "0"]
    words += ["--train.sample-bytes", "4"]
    names = ("adamw", "muon", "lamb", "lars", "sgd")
    program = (
        "import sys\nfrom mpitrain.cli import main\n"
        f"for name in {names}:\n"
        f"    sys.argv[1:] = [*{words}, '--run', {str(tmp_path)!r} + '/' + name, '--optim.name', name]\n"
        "    assert not main(), name\n"
        "    assert 'torch' in sys.modules\n"
        "    assert 'torch._dynamo' not in sys.modules, name"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
