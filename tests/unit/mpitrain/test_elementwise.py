"""The main job's AdamW and SGD: the numbers of torch's. All its optimizers: without torch's compiler.

Updates of elements whose bits do not depend on the cut into shards: those of all optimizers.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import on_ranks

from mpitrain.optim import LAMB, LARS, SGD, AdamW, Muon
from mpitrain.optim.optimizer_checks import ELEMENTWISE, watch_optimizers
from mpitrain.placement.marks import mark_spread

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


def ordered(values: torch.Tensor) -> torch.nn.Parameter:
    """A parameter whose updates must not depend on the cut, as those of a model with slices."""
    param = torch.nn.Parameter(values)
    (alone,) = on_ranks(1, lambda comm: comm)
    mark_spread(param, tuple(values.shape), name="p", everyone=alone, holders=alone, alike=alone, is_ordered=True)
    return param


FUSED = {
    "AdamW": partial(AdamW, lr=0.01, weight_decay=0.1, fused=True),
    "AdamW, amsgrad, maximize": partial(AdamW, lr=0.01, amsgrad=True, maximize=True, fused=True),
    "SGD": partial(SGD, lr=0.1, weight_decay=0.01, fused=True),
    "SGD, nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    "SGD, dampening": partial(SGD, lr=0.1, momentum=0.9, dampening=0.1, maximize=True, fused=True),
    "LAMB": partial(LAMB, lr=0.01, weight_decay=0.0),
    "LARS": partial(LARS, lr=0.1, weight_decay=0.0),
    "Muon's AdamW": partial(Muon, lr=0.01),
}
LOOPS = {
    f"{kind.__name__}, foreach={foreach}": partial(kind, foreach=foreach)
    for kind in ELEMENTWISE
    if kind is not torch.optim.SparseAdam
    for foreach in (False, True)
}


def bits(
    make: Callable[[Any], torch.optim.Optimizer], values: torch.Tensor, grads: list[torch.Tensor], cuts: list[int]
) -> torch.Tensor:
    """The values, and the optimizer's numbers for them, after a step with each of the gradients: one row for each kind of number."""
    bounds = list(pairwise([0, *cuts, len(values)]))
    params = [ordered(values[begin:end].clone()) for begin, end in bounds]
    optimizer = make(params)
    for grad in grads:
        for param, (begin, end) in zip(params, bounds, strict=True):
            param.grad = grad[begin:end].clone()
        optimizer.step()
    assert set(optimizer.state) <= set(params), "there is no state of anything else"

    def numbers_of(param: torch.Tensor) -> Iterator[torch.Tensor]:
        yield param.detach()
        yield from (value for _, value in sorted(optimizer.state[param].items()) if value.shape == param.shape)

    rows = torch.cat([torch.stack(list(numbers_of(param))) for param in params], dim=1)
    return rows.view(torch.int32 if rows.dtype == torch.float32 else torch.int64)


@pytest.mark.rest
@pytest.mark.parametrize("name", [*FUSED, *LOOPS])
@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=5), seed=st.integers(0, 999), is_double=st.booleans())
def test_an_element_gets_the_same_bits_in_any_shard(name: str, cuts: list[int], seed: int, is_double: bool) -> None:
    source = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if is_double else torch.float32
    sizes = 10.0 ** torch.randint(-8, 4, (4, 200), generator=source)
    values, *grads = torch.randn(4, 200, dtype=dtype, generator=source) * sizes
    make = (FUSED | LOOPS)[name]
    assert torch.equal(bits(make, values, grads, sorted(cuts)), bits(make, values, grads, []))


@pytest.mark.parametrize("name", FUSED)
def test_an_element_gets_the_same_bits_for_any_number_of_threads(name: str) -> None:
    """A tensor that threads share: each thread has whole vectors."""
    values, *grads = torch.randn(3, 100_003, generator=torch.Generator().manual_seed(0))
    threads, found = torch.get_num_threads(), []
    try:
        for torch_threads, cuts in ((1, []), (2, []), (3, [50_001])):
            torch.set_num_threads(torch_threads)
            found.append(bits(FUSED[name], values, grads, cuts))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_tail_has_the_number_of_steps_of_its_parameter() -> None:
    values, *grads = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))

    def trained(*sizes: int) -> torch.Tensor:
        """The first 20 elements get their first gradient at the second step."""
        params = [ordered(part.clone()) for part in values.split(sizes)]
        optimizer = AdamW(params, fused=True)
        for step, grad in enumerate(grads):
            for param, part, begin in zip(params, grad.split(sizes), accumulate([0, *sizes[:-1]]), strict=True):
                param.grad = part.clone() if step or begin >= 20 else None
            optimizer.step()
        return torch.cat([param.detach() for param in params])

    assert torch.equal(trained(20, 20), trained(3, 17, 13, 7))


def test_optimizers_that_would_change_bits_with_the_cut_are_refused() -> None:
    watch_optimizers()
    for kind, remedy in ((torch.optim.AdamW, ", or mpitrain.optim.AdamW$"), (torch.optim.Adagrad, "use foreach=True$")):
        param = ordered(torch.zeros(32))
        param.grad = torch.zeros(32)
        kind([param], foreach=True).step()
        with pytest.raises(TypeError, match=rf"{kind.__name__}\(fused=True\) rounds the last elements.*{remedy}"):
            kind([param], fused=True).step()
    param = ordered(torch.zeros(32, dtype=torch.bfloat16))
    param.grad = torch.zeros_like(param)
    with pytest.raises(
        TypeError, match=r"shards in torch.bfloat16, .*make the model in float32, .*param_dtype=torch.bfloat16"
    ):
        torch.optim.RMSprop([param]).step()
