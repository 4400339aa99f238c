"""What fully_shard and a first forward refuse: arguments that mean nothing, ranks that differ, models without values."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

import mpitrain
from collectives import Communicator
from mpitrain.placement.fills import Constant, Normal
from mpitrain.sharding import MixedPrecisionPolicy, fully_shard
from mpitrain.sharding.unit.storage import Resident

pytestmark = pytest.mark.ranks(1, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.outer = nn.Linear(6, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.outer(self.inner(x)))


class Net(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


X = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"stage": True}, ValueError, "stage is True; expected 0, 1, 2 or 3"),
        ({"device": "gpu"}, ValueError, "device is 'gpu'; expected a device with memory"),
        ({"device": "meta"}, ValueError, "device is 'meta'; expected a device with memory"),
        ({"mesh": 3}, TypeError, "mesh is 3; expected a collectives.Communicator"),
        ({"mp_policy": torch.bfloat16}, TypeError, "mp_policy is torch.bfloat16; expected a mpitrain.MixedPrecisionPolicy"),
        ({"ignored_params": ["head.weight"]}, TypeError, "has 'head.weight'; expected only parameters"),
        ({"ignored_params": "head.weight"}, TypeError, "is 'head.weight'; expected a list of parameters"),
        ({"units": "each"}, ValueError, "units is 'each'; expected 'auto', 'one' or modules"),
        ({"units": ["blocks"]}, TypeError, "units has 'blocks'; expected only modules"),
        ({"units": [nn.Linear(2, 2)]}, ValueError, "a Linear that is not within the Net; expected parts of it"),
        ({"ignored_params": nn.Parameter(torch.ones(2))}, TypeError, r"a tensor of shape \(2,\); expected a list"),
    ],
)  # fmt: skip
def test_arguments(comm: Communicator, options: dict[str, Any], error: type[Exception], said: str) -> None:
    model = Net()
    with pytest.raises(error, match=f"fully_shard: .*{said}"):
        fully_shard(model, **{"mesh": comm, **options})
    fully_shard(model, comm)(X)


def test_what_is_no_module_with_a_forward(comm: Communicator) -> None:
    model = Net()
    with pytest.raises(TypeError, match="got a list of modules; torch's function makes it one unit"):
        fully_shard([model.head], comm)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        fully_shard("model", comm)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a ModuleList has no forward"):
        fully_shard(model.blocks, comm)


def test_dtypes(comm: Communicator) -> None:
    low = torch.bfloat16
    with pytest.raises(TypeError, match="param_dtype is 'bfloat16'; expected a floating dtype"):
        MixedPrecisionPolicy("bfloat16")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"keep_fp32 is 'LayerNorm'; expected a tuple of names"):
        MixedPrecisionPolicy(low, keep_fp32="LayerNorm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="param_dtype is None; pass both"):
        MixedPrecisionPolicy(keep_fp32=("LayerNorm",))
    model = Net()
    with pytest.raises(
        ValueError, match=r"'LayerNrom', which is neither a class nor a name .* Net; did you mean 'LayerNorm'"
    ):
        fully_shard(model, comm, mp_policy=MixedPrecisionPolicy(low, keep_fp32=("LayerNrom",)))
    fully_shard(model, comm)

    # A block cannot know what names mean elsewhere: the whole can.
    model, policy = Net(), MixedPrecisionPolicy(low, keep_fp32=("norm", "head"))
    for block in model.blocks:
        fully_shard(block, comm, mp_policy=policy)
    fully_shard(model, comm, mp_policy=policy)
    assert model(X).dtype == low
    part = fully_shard(nn.Linear(4, 4), comm, mp_policy=MixedPrecisionPolicy(low, keep_fp32=("Linaer",)))
    with pytest.raises(ValueError, match=r"'Linaer', .* did you mean 'Linear'"):
        part(X)


def test_names_count_from_the_module_and_its_output_alone_is_cast(comm: Communicator) -> None:
    model, seen = Net(), []
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64, keep_fp32=("blocks.1.*", "blocks.2"))
    fully_shard(model, comm, mp_policy=policy)
    for block in model.blocks:
        block.outer.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        block.register_forward_hook(lambda module, args, out: seen.append(args[0].dtype))
    assert model(X).dtype == torch.float64
    low, high = torch.bfloat16, torch.float32
    # A hook sees inputs that are cast already. Of the second block the parts compute in fp32, of the third the whole.
    assert seen == [low, low, high, low, high, high]


def test_ignored_parameters_of_other_parts_and_of_none(comm: Communicator) -> None:
    model = Net()
    ignored = [model.head.weight]
    for block in model.blocks:
        fully_shard(block, comm, ignored_params=ignored)
    fully_shard(model, comm, ignored_params=ignored)
    model(X)
    with pytest.raises(ValueError, match="that is sharded already, a shard; pass it to the call that shards it"):
        fully_shard(nn.Linear(2, 2), comm, ignored_params=model.blocks[0].parameters())
    other = fully_shard(nn.Linear(4, 2), comm, ignored_params=ignored)
    with pytest.raises(ValueError, match=r"a parameter of shape \(2, 4\) that this Linear does not have"):
        other(X)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("blocks", "the ranks differ: parameter blocks.2.inner.weight .* on rank 0, parameter head.weight .* on rank"),
        ("stage", "the ranks differ: stage=3 on rank 0, stage=2 on rank"),
        ("storage", "the ranks differ: storage='private' on rank 0, storage='auto' on rank"),
        ("frozen", "float32, on cpu on rank 0, parameter head.bias of shape .2,., float32, on cpu, frozen on rank"),
        ("ignored", "float32, on cpu on rank 0, parameter head.bias of shape .2,., float32, on cpu, ignored on rank"),
        ("buffer", "the ranks differ: nothing more on rank 0, buffer seen of shape"),
        ("parts", "the ranks differ: a module Net on rank 0, a module Block on rank"),
    ],
)
def test_ranks_that_differ(comm: Communicator, what: str, said: str) -> None:
    if comm.size == 1:
        pytest.skip("one rank does not differ")
    differs = comm.rank == comm.size - 1
    model = Net(2 if what == "blocks" and differs else 3)
    options: dict[str, Any] = {}
    if what == "stage":
        options["stage"] = 2 if differs else 3
    if what == "storage":
        options["storage"] = "auto" if differs else "private"
    if what == "frozen":
        model.head.bias.requires_grad_(not differs)
    if what == "ignored" and differs:
        options["ignored_params"] = [model.head.bias]
    if what == "buffer" and differs:
        model.register_buffer("seen", torch.zeros(1))
    with pytest.raises(ValueError, match=said):
        fully_shard(model.blocks[0] if what == "parts" and differs else model, comm, **options)


def test_a_call_that_failed_leaves_the_module_as_it_was(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    model.head.bias = nn.Parameter(torch.zeros(2, dtype=torch.float8_e4m3fn), requires_grad=False)  # cannot be reduced
    before = list(model.parameters())
    with pytest.raises(TypeError, match="float8"):
        fully_shard(model, comm)
    assert all(a is b and not vars(a) for a, b in zip(before, model.parameters(), strict=True))

    # A node whose memory is full at the third block's second unit.
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        block.outer.requires_grad_(False)
    wanted, allocate, calls = [param.detach().clone() for param in model.parameters()], Resident._allocate, []

    def fill_up(self: Resident, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(self)
        if len(calls) == 6:
            raise OSError("no room")
        return allocate(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Resident, "_allocate", fill_up)
        with pytest.raises(OSError, match="no room"):
            fully_shard(model, comm, storage="resident", ignored_params=[model.blocks[2].norm.bias])
    assert type(model) is Net and type(model.blocks[2]) is Block
    fully_shard(model, comm, storage="private")
    kinds = [{flat.storage.kind for flat in block._unit.flats} for block in model.blocks]
    assert kinds == [{"resident"}, {"resident"}, {"gathered"} if comm.size > 1 else {"kept"}]
    assert all(hasattr(param, "shard_box") for param in model.parameters())
    model(X).sum().backward()
    with mpitrain.unshard(model):
        assert all(torch.equal(a, b) for a, b in zip(wanted, model.parameters(), strict=True))


def test_some_blocks_sharded_by_hand_are_told_of(comm: Communicator, caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    fully_shard(model.blocks[0], comm)
    with caplog.at_level(logging.INFO, "mpitrain"):
        fully_shard(model, comm)
    assert [record.message for record in caplog.records if "private" not in record.message] == [
        "fully_shard: parts of this Net are sharded already, so its other blocks (2, the first a Block) become one unit with the "
        "rest; shard all of them, or none"
    ]


def test_errors_name_parameters_as_the_whole_model_does(comm: Communicator) -> None:
    for by_hand in (True, False):
        model = Net()
        for block in model.blocks if by_hand else ():
            fully_shard(block, comm)
        fully_shard(model, comm)
        model.blocks[1].inner.weight = nn.Parameter(torch.ones(6, 4))
        with pytest.raises(RuntimeError, match=r"parameter blocks\.1\.inner\.weight was "):
            model(X)


# Models from the meta device


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("frequency", 1 / torch.arange(1.0, 5.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)) * self.frequency


def on_meta() -> Rotary:
    with torch.device("meta"):
        return Rotary()


@pytest.mark.parametrize("storage", ["auto", "private"])
def test_parameters_without_values_are_told_of(comm: Communicator, shared_tmp: Any, storage: Any) -> None:
    with torch.device("meta"):
        model = Net()
    fully_shard(model, comm, storage=storage)
    with pytest.raises(RuntimeError, match=r"weight.* and \d+ more came from the meta device and never got values"):
        model(X)
    wanted = fully_shard(Net(), comm)
    mpitrain.save(shared_tmp / "checkpoint", wanted)
    mpitrain.export_weights(wanted, shared_tmp / "weights")
    state = mpitrain.full_state_dict(wanted)
    for give in (
        lambda m: mpitrain.initialize(m, lambda name: Normal(0.1)),
        lambda m: mpitrain.load(shared_tmp / "checkpoint", m),
        lambda m: mpitrain.load_weights(m, shared_tmp / "weights"),
        lambda m: mpitrain.load_full_state_dict(m, state),
        lambda m: [nn.init.ones_(param) for param in m.parameters()],
    ):
        with torch.device("meta"):
            model = Net()
        fully_shard(model, comm, storage=storage)
        give(model)
        model(X)


def test_buffers_without_memory_are_told_of(comm: Communicator, shared_tmp: Any) -> None:
    model = fully_shard(on_meta(), comm)
    mpitrain.initialize(model, lambda name: Constant(0.5))
    assert model.norm.running_var.tolist() == [1.0] * 4 and model.norm.num_batches_tracked.item() == 0
    with pytest.raises(RuntimeError, match=r"^frequency: buffers on the meta device, without memory"):
        model(X)
    model.to_empty(device="cpu")
    model.frequency.copy_(Rotary().frequency)
    model(X).sum().backward()
    assert model.layer.weight.numel() == 0 or model.layer.weight.unique().item() == 0.5  # to_empty left it alone

    mpitrain.save(shared_tmp / "checkpoint", model)
    state = mpitrain.full_state_dict(model)
    for load in (
        lambda m: mpitrain.load(shared_tmp / "checkpoint", m),
        lambda m: mpitrain.load_full_state_dict(m, state),
    ):
        again = fully_shard(on_meta(), comm)
        load(again)
        assert torch.equal(again.norm.running_mean, model.norm.running_mean)
        again.frequency = Rotary().frequency
        again(X)


def test_a_llama_from_the_meta_device(comm: Communicator, shared_tmp: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config)
    mpitrain.export_weights(fully_shard(transformers.LlamaForCausalLM(config), comm), shared_tmp / "weights")
    mpitrain.load_weights(plain, shared_tmp / "weights")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    fully_shard(model, comm)
    mpitrain.load_weights(model, shared_tmp / "weights")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are in no file
    tokens = torch.arange(10)[None]
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=1e-5, atol=1e-6)
