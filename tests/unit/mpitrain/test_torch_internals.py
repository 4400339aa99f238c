"""What sharding takes from torch without a promise: these tests fail when a release changes it."""

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

from mpitrain.torch_glue import torch_internals
from mpitrain.torch_glue.torch_internals import (
    at_end_of_backward,
    count_writes,
    hook_gradient,
    hooks_on,
    in_backward,
    not_compiled,
    outdate,
    restore,
    run_accumulation_hooks,
    set_compiler,
    storage_of,
    uncompiled_paths,
    with_own_counter,
    without_overrides,
    writes_to_each,
)


def test_whether_a_backward_runs_and_when_it_ends() -> None:
    seen: list[object] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def hook(grad: torch.Tensor) -> None:
        seen.append(in_backward())
        at_end_of_backward(lambda: seen.append(x.grad is not None))

    y.register_hook(hook)
    assert not in_backward()
    y.sum().backward()
    assert seen == [True, True], "within a backward, and the gradient was there at its end"
    assert not in_backward()


def test_a_view_that_was_written_to_can_have_a_hook() -> None:
    seen: list[torch.Tensor] = []
    y = nn.Linear(2, 3)(torch.ones(2, 2, 2))  # a view of a matrix
    y[..., 2:] = 0.0
    hook_gradient(y, seen.append)  # torch's own register_hook ends the process here
    y.sum().backward()
    assert [grad.tolist() for grad in seen] == [torch.ones(2, 2, 3).tolist()]


def test_writes_are_counted_and_a_view_can_have_a_counter_of_its_own() -> None:
    whole = torch.zeros(4)
    view, own = whole[:2], with_own_counter(whole[2:])
    before = count_writes([whole, view])
    view += 1
    assert count_writes([whole, view]) == before + 2, "a view shares the counter"
    assert count_writes([own]) == 0
    own += 1
    assert whole.tolist() == [1, 1, 1, 1] and count_writes([whole, view]) == before + 2


def test_views_share_a_storage_also_while_it_is_freed() -> None:
    whole, other = torch.zeros(4), torch.zeros(4)
    view = nn.Parameter(whole.data[2:])
    assert writes_to_each([whole, view]) == (0, 0)
    view.data.t()
    whole += 1
    assert writes_to_each([whole, view]) == (1, 0)
    places = view.data_ptr() - whole.data_ptr()
    whole.untyped_storage().resize_(0)
    assert storage_of(view.detach().t()) == storage_of(whole) != storage_of(other)
    assert view.data_ptr() - whole.data_ptr() == places == 8
    assert storage_of(torch.zeros(2, 2).to_sparse()) == 0


def test_an_outdated_parameter_stops_a_backward_until_it_is_restored() -> None:
    weight = nn.Parameter(torch.full((2,), 3.0))
    x = torch.ones(2, requires_grad=True)
    loss = (weight * x).sum()
    outdate((weight,))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(retain_graph=True)
    restore((weight,))
    loss.backward()
    assert x.grad is not None and x.grad.tolist() == [3, 3]


def test_hooks_of_a_parameter() -> None:
    param = nn.Parameter(torch.zeros(2))
    run_accumulation_hooks(param)  # none
    assert not hooks_on(param)
    param.register_hook(lambda grad: None)
    assert hooks_on(param)
    seen: list[torch.Tensor] = []
    param.register_post_accumulate_grad_hook(seen.append)
    run_accumulation_hooks(param)
    assert len(seen) == 1 and seen[0] is param


def test_functions_without_overrides() -> None:
    class Own(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            Own.calls += 1
            with without_overrides():
                return func(*args, **(kwargs or {}))

    x = torch.ones(2).as_subclass(Own)
    assert type(x + 1) is torch.Tensor and Own.calls == 1


def test_functions_that_the_compiler_leaves_alone() -> None:
    """Such a function runs as it is, and what it calls is compiled, unless it takes the compiler away."""
    seen: list[str] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @not_compiled
    def middle(x: torch.Tensor) -> torch.Tensor:
        seen.append("middle")  # at each call, and not only while the compiler traces it
        compiler = set_compiler(None)
        x = inner(x)
        assert compiler is not None and (len(seen) == 2 or counter.frame_count == 1)  # the first half of `outer`
        set_compiler(compiler)
        return inner(x)

    counter = CompileCounterWithBackend("eager")

    @torch.compile(backend=counter)
    def outer(x: torch.Tensor) -> torch.Tensor:
        return middle(x * 2) * 3

    for _ in range(2):
        assert outer(torch.ones(2)).tolist() == [12, 12]
    assert seen == ["middle", "middle"]
    assert counter.frame_count == 3 and set_compiler(None) is None
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"block\.compile\(\)"):
        torch.compile(lambda x: middle(x), backend="eager", fullgraph=True)(torch.ones(2))


def test_files_that_the_compiler_leaves_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a function runs as it is, and what it calls is compiled."""
    (tmp_path / "left_alone.py").write_text("def twice(function, x):\n    return function(x) + function(x)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(trace_rules, "SKIP_DIRS", list(trace_rules.SKIP_DIRS))
    monkeypatch.setattr(trace_rules, "SKIP_DIRS_RE", trace_rules.SKIP_DIRS_RE)
    twice = importlib.import_module("left_alone").twice
    assert uncompiled_paths([f"{tmp_path}/"])
    clear_compilation_metrics()

    def body(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    counter = CompileCounterWithBackend("eager")
    call = torch.compile(lambda x: twice(body, x * 2), backend=counter)
    torch.testing.assert_close(call(torch.ones(2)), 2 * (torch.full((2,), 2.0).sin() + 1))
    names = [each.co_name for each in get_compilation_metrics()]
    assert "body" in names and "twice" not in names and counter.frame_count == 2


def test_what_the_compiler_leaves_alone_is_there() -> None:
    """A module that moves takes its place in these lists along."""
    assert all(folder.is_dir() for folder in torch_internals._FOLDERS)
    assert all(file.is_file() for file in torch_internals._FILES)
