"""fully_shard against the plain model: the same values, gradients and losses for every number of ranks."""

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from ways import WAYS, options_of, spread

from collectives import Mesh
from mpitrain.sharding import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, sharded_params

STORAGES = ["resident", "private"]


class Odd(nn.Module):
    """Sizes that no number of ranks divides, vectors of one element, a frozen layer, one never used and one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.twice = nn.Sequential(nn.Linear(7, 7), nn.Tanh())
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.twice(self.first(x)))
        return self.last(self.frozen(x) * self.scale)


class Tied(nn.Module):
    """An embedding that is also the head, around two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def shard_odd(model: Odd, comm, *, mesh: Mesh | None = None, **options) -> None:
    for module in (model.first, model.twice, model):
        fully_shard(module, mesh or comm, **options)


def shard_tied(model: Tied, comm, *, mesh: Mesh | None = None, **options) -> None:
    for module in (*model.blocks, model):
        fully_shard(module, mesh or comm, **options)


def tied_pair(comm, **options) -> tuple[Tied, Tied]:
    """A sharded model, and a plain one with the same values."""
    torch.manual_seed(0)
    model, plain = Tied(), Tied()
    plain.load_state_dict(model.state_dict())
    shard_tied(model, comm, **options)
    return model, plain


def odd_loss(model: nn.Module, step: int, rows: slice) -> torch.Tensor:
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(step))
    return model(x[rows]).square().mean()


def tied_loss(model: nn.Module, step: int, rows: slice) -> torch.Tensor:
    tokens = torch.randint(0, 11, (12, 9), generator=torch.Generator().manual_seed(step))[rows]
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def mine(comm) -> slice:
    return slice(12 // comm.size * comm.rank, 12 // comm.size * (comm.rank + 1))


def rows_of(full: torch.Tensor, box) -> torch.Tensor:
    full = full.view(box.full_shape)
    for dim, (offset, length) in enumerate(zip(box.offset, box.shape, strict=True)):
        full = full.narrow(dim, offset, length)
    return full


def assert_same(model: nn.Module, plain: nn.Module, *, grads: bool, **tolerance: float) -> None:
    """Every shard holds its rows of the plain model's parameter, or of its gradient."""
    reference = dict(plain.named_parameters())
    for name, shard in model.named_parameters():
        expected = reference[name]
        if grads and expected.grad is None:
            assert shard.grad is None, f"{name} has a gradient, the plain model's has none"
            continue
        got, want = (shard.grad, expected.grad) if grads else (shard.detach(), expected.detach())
        torch.testing.assert_close(
            got, rows_of(want, shard.shard_box), msg=lambda text, n=name: f"{n}: {text}", **tolerance
        )


CASES: dict[str, tuple[Callable, Callable, Callable]] = {
    "odd": (Odd, shard_odd, odd_loss),
    "tied": (Tied, shard_tied, tied_loss),
}


@pytest.mark.parametrize(("case", "way", "reshard_after_forward"), spread(CASES, WAYS, [True, False]))
def test_ten_steps_equal_the_plain_model(comm, case: str, way: str, reshard_after_forward: bool) -> None:
    make, shard, loss_of = CASES[case]
    torch.manual_seed(comm.rank)  # rank 0's values count, whatever the others drew
    model = make()
    torch.manual_seed(0)
    plain = make()
    shard(model, comm, **options_of(comm, way), reshard_after_forward=reshard_after_forward)
    assert_same(model, plain, grads=False, rtol=0, atol=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for step in range(10):
        loss = loss_of(model, step, mine(comm))
        loss.backward()
        expected = loss_of(plain, step, slice(None))
        expected.backward()
        total = loss.detach().clone()
        comm.all_reduce(total, "avg")
        torch.testing.assert_close(total, expected.detach(), rtol=1e-5, atol=1e-6)
        assert_same(model, plain, grads=True, rtol=1e-4, atol=1e-6)
        norm = clip_grad_norm_(model, 0.5)
        torch.testing.assert_close(
            norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.5).double(), rtol=1e-5, atol=1e-7
        )
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    # Adam divides by the root of a mean square: where gradients are almost zero, rounding in them becomes visible.
    assert_same(model, plain, grads=False, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_accumulation_with_and_without_sync(comm, way: str) -> None:
    for sync_each in (True, False):
        model, plain = tied_pair(comm, **options_of(comm, way))
        for step in range(3):
            model.set_requires_gradient_sync(sync_each or step == 2)
            tied_loss(model, step, mine(comm)).backward()
            tied_loss(plain, step, slice(None)).backward()
        assert_same(model, plain, grads=True, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_two_forwards_before_one_backward(comm, way: str) -> None:
    model, plain = tied_pair(comm, **options_of(comm, way))
    (tied_loss(model, 0, mine(comm)) + tied_loss(model, 1, mine(comm))).backward()
    (tied_loss(plain, 0, slice(None)) + tied_loss(plain, 1, slice(None))).backward()
    assert_same(model, plain, grads=True, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_activation_checkpointing(comm, way: str) -> None:
    model, plain = tied_pair(comm, **options_of(comm, way))

    def loss_of(model: nn.Module, rows: slice) -> torch.Tensor:
        for block in model.blocks:
            if not hasattr(block, "checkpointed"):
                call = block.forward
                block.forward = lambda x, call=call: torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False)
                block.checkpointed = True
        return tied_loss(model, 0, rows)

    loss_of(model, mine(comm)).backward()
    tied_loss(plain, 0, slice(None)).backward()
    assert_same(model, plain, grads=True, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_checkpointing_whole_sharded_blocks(comm, way: str) -> None:
    """The recomputed forward of a sharded block runs within the backward."""
    model, plain = tied_pair(comm, **options_of(comm, way))
    tokens = torch.randint(0, 11, (12, 9), generator=torch.Generator().manual_seed(0))

    def run(model: nn.Module, rows: slice) -> torch.Tensor:
        x = model.embedding(tokens[rows])
        for block in model.blocks:
            x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return model.head(x).square().mean()

    forward = type(model).forward
    type(model).forward = lambda self, rows: run(self, rows)
    try:
        model(mine(comm)).backward()
    finally:
        type(model).forward = forward
    run(plain, slice(None)).backward()
    assert_same(model, plain, grads=True, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_bf16_compute_keeps_fp32_masters(comm, way: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, plain = tied_pair(comm, **options_of(comm, way), mp_policy=policy)
    half = copy.deepcopy(plain).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for step in range(3):
        tokens = torch.randint(0, 11, (12, 9), generator=torch.Generator().manual_seed(step))
        logits = model(tokens[mine(comm), :-1]).float()
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[mine(comm), 1:].flatten()).backward()
        # The plain way: compute in a bf16 copy, step the fp32 masters.
        for low, high in zip(half.parameters(), plain.parameters(), strict=True):
            low.data.copy_(high.data)
            low.grad = None
        logits = half(tokens[:, :-1]).float()
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        for low, high in zip(half.parameters(), plain.parameters(), strict=True):
            high.grad = low.grad.float()
        assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in model.parameters())
        # bf16 carries 8 bits; gradients of different slices of the batch round differently.
        assert_same(model, plain, grads=True, rtol=0.1, atol=2e-2)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    assert_same(model, plain, grads=False, rtol=0.1, atol=5e-2)


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_unused_on_some_ranks_only(comm, way: str) -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, use_b: bool) -> torch.Tensor:
            return self.b(x) if use_b else self.a(x)

    torch.manual_seed(0)
    model, plain = Branch(), Branch()
    plain.load_state_dict(model.state_dict())
    options = options_of(comm, way)
    fully_shard(model, options.pop("mesh", comm), **options)
    x = torch.arange(12.0).view(3, 4)
    model(x, comm.rank == 1).sum().backward()
    sum(plain(x, rank == 1).sum() for rank in range(comm.size)).backward()
    for param in plain.parameters():
        if param.grad is not None:
            param.grad /= comm.size
    assert_same(model, plain, grads=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_the_step_after_an_exception_works(comm, way: str) -> None:
    model, plain = tied_pair(comm, **options_of(comm, way))

    class Failure(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("in backward")

    def fail(*_: object) -> None:
        raise ArithmeticError("in forward")

    hook = model.blocks[1][1].register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError, match="in forward"):
        tied_loss(model, 0, mine(comm))
    hook.remove()
    hook = model.blocks[0].register_forward_hook(lambda module, args, out: Failure.apply(out))
    with pytest.raises(ArithmeticError, match="in backward"):
        tied_loss(model, 0, mine(comm)).backward()
    hook.remove()
    model.zero_grad()
    comm.barrier()
    tied_loss(model, 1, mine(comm)).backward()
    tied_loss(plain, 1, slice(None)).backward()
    assert_same(model, plain, grads=True, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("storage", STORAGES)
def test_each_rank_holds_its_share(comm, storage: str) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    total = sum(p.numel() for p in model.parameters())
    for layer in model:
        fully_shard(layer, comm, storage=storage)
    fully_shard(model, comm, storage=storage)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    held = sum(p.numel() for p in model.parameters())
    grads = sum(p.grad.numel() for p in model.parameters())
    moments = sum(t.numel() for s in optimizer.state.values() for t in s.values() if t.numel() > 1)
    # Both ends of a shard fall between rows of 64, each half a row off at most: 64 elements of 4,160 in each of 4 layers.
    assert abs(held - total / comm.size) <= 4 * 64
    assert grads == held
    assert abs(moments - 2 * held) <= 16
    sizes = torch.tensor([held])
    comm.all_reduce(sizes)
    assert sizes.item() == total
    if storage == "private" and comm.size > 1:
        assert all(p.full.untyped_storage().size() == 0 for p in sharded_params(model)), (
            "full parameters were not freed"
        )


def test_parameters_are_shards_of_the_same_order_on_all_ranks(comm) -> None:
    model = Odd()
    names = [name for name, _ in model.named_parameters()]
    shard_odd(model, comm)
    assert [name for name, _ in model.named_parameters()] == names
    shapes = comm.all_gather_object([tuple(p.shape) for p in model.parameters()])
    for name, *of_ranks in zip(names, *shapes, strict=True):
        full = dict(Odd().named_parameters())[name].shape or torch.Size((1,))
        assert all(len(shape) == len(full) for shape in of_ranks)
        assert sum(torch.Size(shape).numel() for shape in of_ranks) == full.numel()


def test_evaluation_without_gradients(comm) -> None:
    model, plain = tied_pair(comm)
    with torch.no_grad():
        for step in range(3):
            torch.testing.assert_close(tied_loss(model, step, slice(None)), tied_loss(plain, step, slice(None)))
    assert all(hasattr(p, "shard_box") for p in model.parameters())


def test_wrong_use_is_refused_with_the_way_out(comm) -> None:
    model = Tied()
    fully_shard(model.embedding, comm)
    with pytest.raises(ValueError, match="lowest module that contains all users"):
        fully_shard(model, comm)
    with pytest.raises(ValueError, match="sharded already"):
        fully_shard(model.embedding, comm)
    with pytest.raises(ValueError, match="expected 0, 1, 2 or 3"):
        fully_shard(nn.Linear(2, 2), comm, stage=4)
    with pytest.raises(ValueError, match="in stage 0 each rank has a copy of its own"):
        fully_shard(nn.Linear(2, 2), comm, stage=0, storage="resident")
    if comm.size > 1:
        with pytest.raises(ValueError, match="are not available yet; only dp_replicate and dp_shard"):
            fully_shard(nn.Linear(2, 2), Mesh(comm, {"dp_shard": 1, "tp": -1}))
    with pytest.raises(ValueError, match="expected 'auto', 'resident' or 'private'"):
        fully_shard(nn.Linear(2, 2), comm, storage="disk")  # type: ignore[arg-type]
    sharded = fully_shard(nn.Linear(2, 2), comm)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(sharded)
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(whole[0], comm)
    fully_shard(whole, comm)
    whole[0](torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="run alone before the whole"):
        whole(torch.ones(1, 2))


@pytest.mark.parametrize("storage", STORAGES)
def test_reentrant_checkpointing_without_a_sharded_root(comm, storage: str) -> None:
    torch.manual_seed(0)
    block, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(block.state_dict())
    fully_shard(block, comm, storage=storage)
    x = torch.arange(12.0).view(3, 4).requires_grad_()
    for model in (block, plain):
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True).square().sum().backward()
    assert_same(block, plain, grads=True, rtol=1e-5, atol=1e-6)
    assert all(hasattr(p, "shard_box") and p.shape == p.shard_box.shape for p in block.parameters())


@pytest.mark.parametrize("storage", STORAGES)
def test_a_first_forward_in_inference_mode(comm, storage: str) -> None:
    model, plain = tied_pair(comm, storage=storage)
    with torch.inference_mode():
        tied_loss(model, 0, mine(comm))
    tied_loss(model, 0, mine(comm)).backward()
    tied_loss(plain, 0, slice(None)).backward()
    assert_same(model, plain, grads=True, rtol=1e-4, atol=1e-6)


def test_memory_of_the_node_goes_with_the_model(comm) -> None:
    def segments() -> int:
        gc.collect()
        with open("/proc/self/maps") as maps:
            return sum("mpitrain-" in line for line in maps)

    comm.barrier()
    before = segments()
    for _ in range(3):
        model = nn.Linear(64, 64)
        fully_shard(model, comm, storage="resident")
        model(torch.ones(2, 64)).sum().backward()
        assert segments() > before
        del model
    assert segments() == before


def test_clipping_of_infinite_and_of_double_gradients(comm) -> None:
    model = fully_shard(nn.Linear(4, 4).double(), comm)
    x = torch.full((1, 4), 1.0, dtype=torch.float64)
    model(x).sum().backward()
    assert clip_grad_norm_(model, 0.5).item() == pytest.approx(20**0.5)
    grads = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum()
    comm.all_reduce(grads)
    assert grads.sqrt().item() == pytest.approx(0.5, rel=1e-5)
    model.zero_grad()
    model(x * float("inf")).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    assert clip_grad_norm_(model, 0.5).isinf()
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))


def test_buffers_of_any_kind_begin_as_rank_0s(comm) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("rotary", torch.full((3,), complex(comm.rank, 1)))
    model.register_buffer("expanded", torch.full((1,), float(comm.rank)).expand(4))
    fully_shard(model, comm)
    model(torch.ones(1, 2))
    assert torch.equal(model.rotary, torch.full((3,), complex(0, 1)))
    assert torch.equal(model.expanded, torch.zeros(4))


@pytest.mark.parametrize("storage", STORAGES)
def test_parameters_that_cannot_be_reduced_are_refused(comm, storage: str) -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(4).to(torch.float8_e4m3fn))
    with pytest.raises(TypeError, match=r"dtype torch\.float8_e4m3fn is not supported; expected one of float64"):
        fully_shard(model, comm, storage=storage)


def test_parameters_ignored_by_a_block_are_ignored_by_the_whole(comm) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    bias = model[0].bias
    fully_shard(model[0], comm, ignored_params=[bias])
    fully_shard(model, comm)
    assert model[0].bias is bias
    model(torch.ones(1, 4)).sum().backward()
    assert bias.grad is not None


def test_changes_that_the_full_parameters_would_not_follow_are_refused(comm) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), comm)
    with pytest.raises(TypeError, match="cannot be cast or moved"):
        model.double()
    assert model.to("cpu") is model
