"""fully_shard against the plain model where a step is not the plain one of test_parity.py; what ranks hold; what is refused."""

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_models import Odd, Tied, language_loss, regression_loss, tokens
from safetensors.torch import load_file
from sharded_models import STORAGES, assert_same, mine, pair_of, shard
from torch import nn
from ways import WAYS

import ckpt
import mpitrain
from collectives import Communicator, Mesh
from mpitrain.sharding import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, sharded_over, sharded_params
from mpitrain.sharding.unit.layout import rows_of


def tied_pair(comm: Communicator, way: str | None = None, **more: Any) -> tuple[Tied, Tied]:
    """A sharded model of two blocks, and a plain one with the same values."""
    return pair_of(Tied, comm, way, lambda model: model.blocks, **more)


@pytest.mark.parametrize("way", WAYS)
def test_accumulation_with_and_without_sync(comm, way: str) -> None:
    for sync_each in (True, False):
        model, plain = tied_pair(comm, way)
        for step in range(3):
            model.set_requires_gradient_sync(sync_each or step == 2)
            language_loss(model, step, mine(comm)).backward()
            language_loss(plain, step, slice(None)).backward()
        assert_same(model, plain, grads=True, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_two_forwards_before_one_backward(comm, way: str) -> None:
    model, plain = tied_pair(comm, way)
    (language_loss(model, 0, mine(comm)) + language_loss(model, 1, mine(comm))).backward()
    (language_loss(plain, 0, slice(None)) + language_loss(plain, 1, slice(None))).backward()
    assert_same(model, plain, grads=True, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_activation_checkpointing(comm, way: str) -> None:
    model, plain = tied_pair(comm, way)

    def loss_of(model: nn.Module, rows: slice) -> torch.Tensor:
        for block in model.blocks:
            if not hasattr(block, "checkpointed"):
                call = block.forward
                block.forward = lambda x, call=call: torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False)
                block.checkpointed = True
        return language_loss(model, 0, rows)

    loss_of(model, mine(comm)).backward()
    language_loss(plain, 0, slice(None)).backward()
    assert_same(model, plain, grads=True, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_checkpointing_whole_sharded_blocks(comm, way: str) -> None:
    """The recomputed forward of a sharded block runs within the backward."""
    model, plain = tied_pair(comm, way)

    def run(model: nn.Module, rows: slice) -> torch.Tensor:
        x = model.embedding(tokens(0)[rows])
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
    model, plain = tied_pair(comm, way, mp_policy=policy)
    half = copy.deepcopy(plain).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    for step in range(3):
        language_loss(model, step, mine(comm)).backward()
        # The plain way: compute in a bf16 copy, step the fp32 masters.
        for low, high in zip(half.parameters(), plain.parameters(), strict=True):
            low.data.copy_(high.data)
            low.grad = None
        language_loss(half, step, slice(None)).backward()
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

    model, plain = pair_of(Branch, comm, way)
    x = torch.arange(12.0).view(3, 4)
    model(x, comm.rank == 1).sum().backward()
    sum(plain(x, rank == 1).sum() for rank in range(comm.size)).backward()
    for param in plain.parameters():
        if param.grad is not None:
            param.grad /= comm.size
    assert_same(model, plain, grads=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_the_step_after_an_exception_works(comm, way: str) -> None:
    model, plain = tied_pair(comm, way)

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
        language_loss(model, 0, mine(comm))
    hook.remove()
    hook = model.blocks[0].register_forward_hook(lambda module, args, out: Failure.apply(out))
    with pytest.raises(ArithmeticError, match="in backward"):
        language_loss(model, 0, mine(comm)).backward()
    hook.remove()
    model.zero_grad()
    comm.barrier()
    language_loss(model, 1, mine(comm)).backward()
    language_loss(plain, 1, slice(None)).backward()
    assert_same(model, plain, grads=True, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("storage", STORAGES)
def test_each_rank_holds_its_share(comm, storage: str) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    total = sum(p.numel() for p in model.parameters())
    shard(model, comm, blocks=model, storage=storage)
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
    shard(model, comm, blocks=[model.first, model.twice])
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
            torch.testing.assert_close(language_loss(model, step, slice(None)), language_loss(plain, step, slice(None)))
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
    with pytest.raises(ValueError, match="in stage 0 each rank has its own copy"):
        fully_shard(nn.Linear(2, 2), comm, stage=0, storage="resident")
    if comm.size > 1:
        for axis, message in (
            (
                "model",
                "nothing divides a model along mesh axes model=.*; expected sizes above 1 only of dp_replicate, dp_shard, cp, pp, tp",
            ),
            ("pp", "is in no stage, but the mesh has pp=.* stages, whose ranks would train models that differ"),
        ):
            with pytest.raises(ValueError, match=message):
                fully_shard(nn.Linear(2, 2), Mesh(comm, {"dp_shard": 1, axis: -1}))
    with pytest.raises(ValueError, match="expected 'auto', 'resident' or 'private'"):
        fully_shard(nn.Linear(2, 2), comm, storage="disk")  # type: ignore[arg-type]
    sharded = fully_shard(nn.Linear(2, 2), comm)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(sharded)
    whole = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(whole[0], comm)
    whole[0](torch.ones(1, 2))
    fully_shard(whole, comm)
    with pytest.raises(RuntimeError, match="run alone before the whole"):
        whole(torch.ones(1, 2))


def test_data_parallel_ranks_have_roles_in_a_mesh(comm) -> None:
    half = 2 - comm.size % 2
    for axes, cut in [
        ({"pp": 1, "dp_shard": 1, "cp": -1, "tp": 1}, comm.size),
        ({"dp_replicate": -1, "tp": 1}, 1),
        ({"dp_replicate": 1, "dp_shard": half, "cp": -1}, comm.size),
        ({"dp_replicate": -1, "dp_shard": 1, "cp": half}, half),
    ]:
        mesh = Mesh(comm, axes)
        model, plain = pair_of(lambda: nn.Linear(4, 12), comm, mesh=mesh)
        ranks = sharded_over(model)
        assert (ranks.data_parallel, ranks.shard.size, ranks.replicate.size) == (comm, cut, comm.size // cut)
        for each in (model, plain):
            each(torch.arange(12.0).view(3, 4)).square().sum().backward()
        assert_same(model, plain, grads=True, rtol=1e-5, atol=1e-6)
        mesh.free()


@pytest.mark.parametrize("storage", STORAGES)
def test_reentrant_checkpointing_without_a_sharded_root(comm, storage: str) -> None:
    block, plain = pair_of(lambda: nn.Linear(4, 4), comm, storage=storage)
    x = torch.arange(12.0).view(3, 4).requires_grad_()
    for model in (block, plain):
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True).square().sum().backward()
    assert_same(block, plain, grads=True, rtol=1e-5, atol=1e-6)
    assert all(hasattr(p, "shard_box") and p.shape == p.shard_box.shape for p in block.parameters())


def test_a_module_that_runs_twice_under_reentrant_checkpointing(comm) -> None:
    """Each of its runs is a backward of its own within the backward: the unit is reduced after both."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for _ in range(2):
                x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=True)
            return x

    torch.manual_seed(0)
    plain = Twice()
    model = copy.deepcopy(plain)
    shard(model, comm, blocks=[model.block], storage="resident")
    for m in (plain, model):
        m(torch.ones(2, 5)).square().sum().backward()
    grads = {name: param.grad for name, param in plain.named_parameters()}
    for param in sharded_params(model):
        torch.testing.assert_close(param.shard.grad, rows_of(grads[param.name], param.box))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_first_forward_in_inference_mode(comm, storage: str) -> None:
    model, plain = tied_pair(comm, storage=storage)
    with torch.inference_mode():
        language_loss(model, 0, mine(comm))
    language_loss(model, 0, mine(comm)).backward()
    language_loss(plain, 0, slice(None)).backward()
    assert_same(model, plain, grads=True, rtol=1e-4, atol=1e-6)


@pytest.mark.rest
def test_memory_of_the_node_goes_with_the_model(comm) -> None:
    def segments() -> set[str]:
        """The inodes of the files in shared memory that are mapped."""
        gc.collect()
        with open("/proc/self/maps") as maps:
            return {line.split()[4] for line in maps if "mpitrain-" in line}

    comm.barrier()
    before = segments()
    for _ in range(3):
        model = nn.Linear(64, 64)
        fully_shard(model, comm, storage="resident")
        model(torch.ones(2, 64)).sum().backward()
        assert segments() - before or comm.size == 1  # one rank needs no file
        del model
    assert not segments() - before


def test_clipping_takes_the_model(comm) -> None:
    with pytest.raises(TypeError, match="clip_grad_norm_: expected the model, got generator"):
        clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)


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


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("storage", STORAGES)
def test_units_over_two_meshes_of_the_same_ranks(comm, storage: str, shared_tmp: Path) -> None:
    """Blocks in two copies, the rest in one: as experts have a mesh of their own."""
    copies, one = Mesh(comm, {"dp_replicate": 2, "dp_shard": -1}), Mesh(comm, {"dp_shard": -1})
    for inner, outer in ((copies, one), (one, copies)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        plain = copy.deepcopy(model)
        fully_shard(model[0], inner, storage=storage)
        fully_shard(model, outer, storage=storage)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
        for step in range(3):
            regression_loss(model, step, mine(comm)).backward()
            regression_loss(plain, step, slice(None)).backward()
            norms = clip_grad_norm_(model, 0.3), nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
            torch.testing.assert_close(norms[0].float(), norms[1], rtol=1e-4, atol=1e-6)
            assert_same(model, plain, grads=True, rtol=1e-3, atol=1e-5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        name = "inner" if inner is copies else "outer"
        mpitrain.save(shared_tmp / name, model)
        mpitrain.export_weights(model, shared_tmp / f"{name}.safetensors")
        whole = mpitrain.full_state_dict(model)
        if comm.rank == 0:
            for key, value in plain.state_dict().items():
                torch.testing.assert_close(whole[key], value, rtol=1e-3, atol=1e-5)
                saved = torch.from_numpy(ckpt.open(shared_tmp / name)[f"model/{key}"][...])
                assert torch.equal(saved, whole[key])
                assert torch.equal(load_file(shared_tmp / f"{name}.safetensors")[key], whole[key])
        mpitrain.load(shared_tmp / name, model)


def test_a_part_over_other_ranks_than_the_whole(comm) -> None:
    if comm.size == 1:
        pytest.skip("needs ranks to leave out")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0], comm)
    fully_shard(model, comm.split(comm.rank))
    with pytest.raises(
        ValueError, match=f"sharded over {comm.size} ranks that are not all among the 1 ranks of the whole"
    ):
        model(torch.ones(1, 2))
