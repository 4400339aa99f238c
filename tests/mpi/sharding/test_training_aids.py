"""What goes with a sharded model's training: averages of weights, norms of gradients, loss scaling, modules that stay in fp32."""

import copy
import math
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_models import STORAGES, assert_same, floats, loss_of, pair_with_a_part_on_every_rank
from torch import nn
from ways import WAYS

import ckpt
import mpitrain
from collectives import Communicator
from mpitrain.sharding import MixedPrecisionPolicy, fully_shard
from mpitrain.sharding.unit.layout import rows_of

pytestmark = pytest.mark.ranks(1, 2, 3)


@pytest.mark.parametrize("way", WAYS)
def test_norms_of_the_gradients_of_each_parameter(comm: Communicator, way: str) -> None:
    model, plain = pair_with_a_part_on_every_rank(comm, way)
    for m in (model, plain):
        m[3].bias.requires_grad_(False)
        loss_of(m, 0).backward()
    expected = {name: p.grad.norm().item() for name, p in plain.named_parameters() if p.grad is not None}
    assert mpitrain.grad_norms(model) == pytest.approx(expected, rel=1e-5)
    assert mpitrain.grad_norms(plain) == pytest.approx(expected, rel=1e-6)
    assert "3.bias" not in expected and len(expected) == 7


@pytest.mark.parametrize("way", WAYS)
def test_an_average_of_the_weights(comm: Communicator, way: str) -> None:
    model, plain = pair_with_a_part_on_every_rank(comm, way)
    ema, optimizer = mpitrain.EMA(model, 0.75), torch.optim.SGD(model.parameters(), lr=0.5)
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    averages = {name: param.detach().clone() for name, param in plain.named_parameters()}
    for step in range(3):
        loss_of(model, step).backward()
        loss_of(plain, step).backward()
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
        ema.update()
        for name, param in plain.named_parameters():
            averages[name] = 0.75 * averages[name] + 0.25 * param.detach()
    before = [param.detach().clone() for param in model.parameters()]
    averaged = copy.deepcopy(plain)
    averaged.load_state_dict(averages)
    with torch.no_grad():
        with ema.swapped():
            torch.testing.assert_close(loss_of(model, 9), loss_of(averaged, 9), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(loss_of(model, 9), loss_of(plain, 9), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(ValueError, match="expected at least 0 and less than 1"):
        mpitrain.EMA(model, 1.0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_slow_average_of_16_bits_moves(comm: Communicator, shared_tmp: Path, dtype: torch.dtype) -> None:
    """Beside parameters in fp32. In 16 bits each change would be rounded away."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False).to(dtype), torch.nn.Linear(3, 2, bias=False))
    for param in model.parameters():
        torch.nn.init.ones_(param)
    mpitrain.fully_shard(model, comm)
    ema = mpitrain.EMA(model, 0.999)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(2)
    for _ in range(300):
        ema.update()
    expected = 2 - 0.999**300
    for average in ema.tensors.values():
        # fp32 rounds 300 times, by 1e-7 each
        torch.testing.assert_close(average, torch.full_like(average, expected), rtol=0, atol=3e-5)
    kept = {name: average.clone() for name, average in ema.tensors.items()}
    with ema.swapped():
        assert (model[0].weight == torch.tensor(expected).to(dtype)).all()
        torch.testing.assert_close(model[1].weight, torch.full_like(model[1].weight, expected), rtol=0, atol=3e-5)
    assert all((param == 2).all() for param in model.parameters())
    assert all(torch.equal(average, kept[name]) for name, average in ema.tensors.items())
    mpitrain.save(shared_tmp / "wide", model, ema=ema)
    ema.tensors["0.weight"] = ema.tensors["0.weight"].to(dtype)  # as older versions averaged
    mpitrain.save(shared_tmp / "narrow", model, ema=ema)
    for name in ("wide", "narrow"):
        other = mpitrain.EMA(model, 0.5)
        mpitrain.load(shared_tmp / name, model, ema=other)
        want = kept["0.weight"] if name == "wide" else ema.tensors["0.weight"].float()
        assert torch.equal(other.tensors["0.weight"], want) and torch.equal(other.tensors["1.weight"], kept["1.weight"])
    other.tensors["0.weight"].fill_(5)
    mpitrain.load(shared_tmp / "narrow", model, ema=other, only="1.*")
    assert (other.tensors["0.weight"] == 5).all()


@pytest.mark.parametrize("way", WAYS)
def test_an_average_goes_with_a_checkpoint_to_other_shards(comm: Communicator, shared_tmp: Path, way: str) -> None:
    model, plain = pair_with_a_part_on_every_rank(comm, way)
    ema = mpitrain.EMA(model, 0.75)
    for value in ema.tensors.values():
        value.mul_(2)
    mpitrain.save(shared_tmp / "checkpoint", model, ema=ema)
    expected = {name: 2 * param.detach() for name, param in plain.named_parameters()}
    # One rank alone, as from a job of one, and shards cut otherwise: the parts are boxes of the whole in any case.
    other = fully_shard(copy.deepcopy(plain), comm, stage=3, storage="private", units="one")
    for again in (plain, other):
        average = mpitrain.EMA(again, 0.5)
        mpitrain.load(shared_tmp / "checkpoint", again, ema=average)
        for name, value in average.tensors.items():
            box = getattr(dict(again.named_parameters())[name], "shard_box", None)
            want = expected[name]
            assert torch.equal(value, want if box is None else rows_of(want, box)), name
    mpitrain.save(shared_tmp / "without", model)
    with pytest.raises(ckpt.CheckpointError, match="ema/"):
        mpitrain.load(shared_tmp / "without", model, ema=ema)


@pytest.mark.parametrize("way", WAYS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(comm: Communicator, way: str) -> None:
    model, plain = pair_with_a_part_on_every_rank(comm, way)
    optimizer, reference = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, plain))
    scaler = mpitrain.GradScaler(model, scale=1024.0, interval=2)
    scales = []
    for step in range(5):
        loss = scaler.scale(loss_of(model, step))
        if step == 1 and comm.rank == comm.size - 1:
            loss = loss * math.inf
        loss.backward()
        before = [param.detach().clone() for param in model.parameters()]
        stepped = scaler.step(optimizer)
        assert stepped == (step != 1)
        if stepped:
            loss_of(plain, step).backward()
            reference.step()
            reference.zero_grad()
        else:
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        optimizer.zero_grad()
        scales.append(scaler.value)
    assert scales == [1024, 512, 512, 1024, 1024]
    assert scaler.num_skipped == 1
    assert_same(model, plain, grads=False, rtol=1e-4, atol=1e-6)
    again = mpitrain.GradScaler(model)
    again.load_state_dict(scaler.state_dict())
    assert (again.value, again.num_skipped) == (1024, 1)
    with pytest.raises(ValueError, match="expected a scale above 0"):
        mpitrain.GradScaler(model, scale=0)


@pytest.mark.parametrize("way", ["stage 0", "stage 3", "stage 3, private"])
def test_a_scaler_for_several_optimizers(comm: Communicator, way: str) -> None:
    model, plain = pair_with_a_part_on_every_rank(comm, way)
    first, second = (
        [param for i in (0, 1) for param in model[i].parameters()],
        [*model[3].parameters(), *model[4].parameters()],
    )
    ours = [torch.optim.SGD(params, lr=0.5) for params in (first, second)]
    theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
    both = torch.optim.SGD(model.parameters(), lr=0.0)  # has the parameters of the others, too
    scaler = mpitrain.GradScaler(model, scale=1024.0, interval=2)
    with pytest.raises(RuntimeError, match="has a gradient on any rank; call backward first"):
        scaler.step(ours[0])
    for step, calls_update in enumerate((True, False, True)):
        scaler.scale(loss_of(model, step)).backward()
        loss_of(plain, step).backward()
        assert [scaler.step(o) for o in (*ours, both)] == [True] * 3
        theirs.step()
        if calls_update:
            scaler.update()
        for o in (*ours, theirs):
            o.zero_grad()
    assert (scaler.value, scaler.num_skipped) == (2048, 0)
    assert_same(model, plain, grads=False, rtol=1e-4, atol=1e-6)

    # One overflow, in gradients of the second alone, is one overflow, and the second's.
    scaler.scale(loss_of(model, 3)).backward()
    model[3].weight.grad.fill_(math.inf)
    assert [scaler.step(o) for o in ours] == [True, False]
    scaler.update()
    assert (scaler.value, scaler.num_skipped) == (1024, 1)
    # Gradients that wait for their optimizer while the scale changes keep their true size.
    model.zero_grad()
    scaler.scale(loss_of(model, 3)).backward()
    wanted = [param.grad / 1024 for param in second]
    model[0].weight.grad.fill_(math.inf)
    assert not scaler.step(ours[0])
    scaler.scale(torch.zeros(()))
    assert scaler.value == 512 and scaler.unscale_(ours[1])
    for param, want in zip(second, wanted, strict=True):
        torch.testing.assert_close(param.grad, want)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_norms_of_encoder_layers_compute_in_fp32_in_evaluation(
    comm: Communicator, dtype: torch.dtype, storage: str
) -> None:
    """There torch's fast path of the layer reads the parameters of the norms without a call of them."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8)).eval()
    plain, x = copy.deepcopy(model), torch.randn(2, 3, 8)
    padding = torch.tensor([[False, False, False], [False, False, True]])  # torch makes a nested tensor of such a batch
    policy = MixedPrecisionPolicy(dtype, torch.float32, torch.float32, keep_fp32=("LayerNorm",))
    fully_shard(model, comm, mp_policy=policy, storage=storage)
    seen: list[torch.dtype] = []
    for norm in (part for part in model.modules() if isinstance(part, nn.LayerNorm)):
        norm.forward = lambda x, whole=norm: seen.append(x.dtype) or nn.LayerNorm.forward(whole, x)  # type: ignore[assignment]
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 0.05}[dtype]
    with torch.no_grad():
        for _ in range(2):
            for mask in (None, padding):
                result, expected = (m(x, src_key_padding_mask=mask) for m in (model, plain))
                torch.testing.assert_close(result, expected, rtol=0, atol=tolerance)
    assert seen == [torch.float32] * 4 * 5  # two norms of each layer, and the last one
    whole = fully_shard(copy.deepcopy(plain), comm, storage=storage)
    assert all(layer.activation_relu_or_gelu for layer in whole.layers)  # the fast path stays


@pytest.mark.parametrize("way", WAYS)
def test_named_modules_compute_in_fp32(comm: Communicator, way: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, keep_fp32=("LayerNorm", "3"))
    model, plain = pair_with_a_part_on_every_rank(comm, way, mp_policy=policy)
    seen: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype]] = {}

    def look(name: str, module: nn.Module) -> None:
        module.register_forward_hook(
            lambda m, args, out: seen.__setitem__(name, (args[0].dtype, m.weight.dtype, out.dtype))
        )

    for name, module in model.named_children():
        if name in "013":
            look(name, module)
    model[4].bfloat16()  # ignored, so the caller's own
    plain.bfloat16()
    loss_of(model, 0).backward()
    with torch.no_grad():
        for m in (plain[1], plain[3]):
            m.float()
    x = floats(0, 5).bfloat16()
    y = plain[3](plain[2](plain[1](plain[0](x).float()).bfloat16()).float()).bfloat16()
    plain[4](y).float().square().mean().backward()
    low, high = torch.bfloat16, torch.float32
    # A hook sees the module's own inputs, before they are cast, and what forward returns, after it is.
    assert seen["0"][1] == low and seen["1"][1] == seen["3"][1] == high
    assert seen["1"][2] in (low, high)
    assert all(p.dtype == high for p in model.parameters() if hasattr(p, "shard_box"))
    for name, shard in model.named_parameters():
        if hasattr(shard, "shard_box"):
            want = rows_of(dict(plain.named_parameters())[name].grad.float(), shard.shard_box)
            torch.testing.assert_close(shard.grad, want, rtol=0.1, atol=2e-2)


def test_optimizers_that_would_go_wrong_are_refused(comm: Communicator) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    early = torch.optim.AdamW(model.parameters())
    fully_shard(model, comm, storage="private")
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"holds 0.weight from before fully_shard, so it would train nothing"):
        early.step()
    whole = torch.optim.Adafactor(model.parameters())
    if comm.size > 1:
        with pytest.raises(TypeError, match="Adafactor needs whole matrices"):
            whole.step()
        with pytest.raises(TypeError, match=r"Muon needs whole matrices.*; use mpitrain\.optim\.Muon, an element-wise"):
            torch.optim.Muon(param for param in model.parameters() if param.ndim == 2).step()
        row = fully_shard(nn.Linear(4, 1, bias=False), comm)  # one rank has all of it
        row(torch.ones(2, 4)).sum().backward()
        with pytest.raises(TypeError, match=r"Muon needs whole matrices.* but weight is cut: .* of shape \(1, 4\)"):
            torch.optim.Muon(row.parameters()).step()
        torch.optim.AdamW(row.parameters()).step()
    else:
        whole.step()
    copies = fully_shard(nn.Linear(4, 4), comm, stage=0)
    copies(torch.ones(2, 4)).sum().backward()
    torch.optim.Adafactor(copies.parameters()).step()
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    torch.optim.Adafactor(plain.parameters()).step()


def test_optimizers_of_unknown_kinds(comm: Communicator) -> None:
    class Normed(torch.optim.Optimizer):
        def __init__(self, params: Iterable[nn.Parameter]) -> None:
            super().__init__(params, {})

        def step(self) -> None:  # type: ignore[override]
            pass

    def step(kind: Any) -> list[str]:
        model = fully_shard(nn.Linear(4, 6), comm)
        model(torch.ones(2, 4)).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kind(model.parameters()).step()
        assert all(warning.category is RuntimeWarning for warning in caught)
        return [str(warning.message) for warning in caught]

    told = step(Normed)
    assert len(told) == (comm.size > 1 and comm.rank == 0)
    assert all(
        "each rank updates only its own part" in text and "Normed.is_elementwise = True" in text for text in told
    )
    assert step(Normed) == []  # once for a class
    for name in ("Lion", "Declared"):
        kind = type(name, (Normed,), {"is_elementwise": True} if name == "Declared" else {})
        assert step(kind) == []
    assert step(type("MyAdam", (torch.optim.AdamW,), {})) == []
    assert step(torch.optim.RMSprop) == []
    for name in ("Prodigy", "DAdaptAdam", "Refused"):
        kind = type(name, (Normed,), {"is_elementwise": False} if name == "Refused" else {})
        if comm.size > 1:
            with pytest.raises(TypeError, match=f"{name} needs whole matrices, or all parameters"):
                step(kind)
        else:
            assert step(kind) == []


@pytest.mark.parametrize("way", WAYS)
def test_no_sync_accumulates_until_the_backward_after_it(comm: Communicator, way: str) -> None:
    model, plain = pair_with_a_part_on_every_rank(comm, way)
    with model.no_sync():
        loss_of(model, 0).backward()
        loss_of(model, 1).backward()
    assert all(param.grad is None for param in model.parameters() if hasattr(param, "shard_box"))
    loss_of(model, 2).backward()
    for step in range(3):
        loss_of(plain, step).backward()
    expected = {name: p.grad.norm().item() for name, p in plain.named_parameters()}
    assert mpitrain.grad_norms(model) == pytest.approx(expected, rel=1e-4)


def test_buffers_are_made_the_same(comm: Communicator) -> None:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))

    model = fully_shard(Buffers(), comm)
    for how, expected in (("average", (comm.size - 1) / 2), ("broadcast", 0.0)):
        for buffer in model.buffers():
            buffer.fill_(comm.rank)
        mpitrain.sync_buffers(model, how)
        assert model.mean.tolist() == pytest.approx([expected] * 3)
        assert model.count.item() == 0
        assert model.phase.tolist() == pytest.approx([expected + 0j] * 2)
    with pytest.raises(ValueError, match="expected 'average' or 'broadcast'"):
        mpitrain.sync_buffers(model, "sum")  # type: ignore[arg-type]
    mpitrain.sync_buffers(nn.BatchNorm1d(2))
