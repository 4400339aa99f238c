"""Random numbers are the same where the ranks hold the same part, and different where parts differ."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

import mpitrain
from collectives import Communicator
from mpitrain.tensor import Style

pytestmark = pytest.mark.ranks(2, 3)

VOCAB, LENGTH, WIDTH, HEADS = 101, 12, 24, 6  # 2 and 3 ranks share the last three


class Drop(nn.Dropout):
    """A dropout that remembers its masks."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.masks: list[torch.Tensor] = []

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        mask = super().forward(torch.ones_like(input))
        self.masks.append(mask.detach().cpu() > 0)
        return input * mask


class Attention(nn.Module):
    """A region. The tokens of its first dropout, and without sequence parallelism of its last one, are whole on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.before, self.scores, self.after = Drop(), Drop(), Drop()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.before(x)).view(*x.shape[:2], 3, -1, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        y = self.scores((q @ k.mT).softmax(-1)) @ v
        return self.after(self.proj(y.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """A region with two sums over the ranks, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.up2, self.down2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.first, self.second = Drop(), Drop()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.first(F.gelu(self.up(x))))
        return y + self.down2(self.second(F.silu(self.up2(x))))


class Experts(nn.Module):
    """Stacked matrices of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 2 * WIDTH, WIDTH) / 5)
        self.down = nn.Parameter(torch.randn(2, WIDTH, 2 * WIDTH) / 5)
        self.hidden = Drop()

    def forward(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(F.silu(torch.einsum("blc,ehc->bleh", x, self.up)))
        return torch.einsum("bleh,ech,ble->blc", hidden, self.down, gates)


class Mixture(nn.Module):
    """A router and experts: all ranks that have a token must route it to the same experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.before = nn.Linear(WIDTH, 2), Experts(), Drop()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.router(self.before(x)).softmax(-1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.stream = nn.LayerNorm(WIDTH), Attention(), Drop()
        self.norm2, self.mlp, self.mixture = nn.LayerNorm(WIDTH), MLP(), Mixture()
        self.stream2 = Drop()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stream(x + self.attention(self.norm(x)))
        y = self.norm2(x)
        return x + self.stream2(self.mlp(y) + self.mixture(y))


PLAN = {
    "embedding": Style("vocabulary"),
    "blocks.*.attention.qkv": Style("column", parts=3, blocks=HEADS),
    "blocks.*.attention.proj": Style("row", blocks=HEADS),
    **{f"blocks.*.mlp.{name}": Style("column") for name in ("up", "up2")},
    **{f"blocks.*.mlp.{name}": Style("row") for name in ("down", "down2")},
    "blocks.*.mixture.experts": Style("region"),
    "blocks.*.mixture.experts.up": Style("parameter", dim=1),
    "blocks.*.mixture.experts.down": Style("parameter", dim=2),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.start, self.end = nn.Embedding(VOCAB, WIDTH), Drop(), Drop()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.call: Callable[..., torch.Tensor] = lambda block, x: block(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.start(self.embedding(tokens))
        for block in self.blocks:
            x = self.call(block, x)
        return self.end(x)

    def masks(self) -> dict[str, torch.Tensor]:
        """The last mask of each dropout."""
        return {name: module.masks[-1] for name, module in self.named_modules() if isinstance(module, Drop)}


def made(comm: Communicator, *, sequence: bool, device: str = "cpu") -> Model:
    torch.manual_seed(1)
    return mpitrain.tensor_parallel(Model().to(device), comm, PLAN, sequence=sequence)  # type: ignore[return-value]


TOKENS = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def step(model: nn.Module, seed: int = 5) -> list[torch.Tensor]:
    """The output, the gradients, and the generator's state after them."""
    torch.manual_seed(seed)
    model.zero_grad()
    y = model(TOKENS.to(next(model.parameters()).device))
    y.square().mean().backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return [y.detach(), *(grad.clone() for grad in grads), torch.get_rng_state()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def of_all(comm: Communicator, value: Any) -> list[Any]:
    found: list[Any] = comm.mpi.allgather(value)
    return found


def are_the_same(comm: Communicator, *values: torch.Tensor) -> bool:
    """Whether all ranks have the same tensors."""
    mine = [value.cpu() for value in values]
    return all(same(other, mine) for other in of_all(comm, mine))


@pytest.fixture(params=[False, True], ids=["whole", "sequence"])
def sequence(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_masks(comm: Communicator, sequence: bool, device: str) -> None:
    if comm.size not in (2, 3):
        pytest.skip("needs several ranks that share 6 heads")
    model = made(comm, sequence=sequence, device=device)
    output, *_, state = step(model)
    assert are_the_same(comm, output, state)
    for name, mask in model.masks().items():
        *_, key = name.split(".")
        is_whole = key in ("start", "end") or name.endswith("attention.before")
        is_whole |= (key in ("after", "stream", "stream2") or name.endswith("mixture.before")) and not sequence
        assert are_the_same(comm, mask) == is_whole, name
        assert len({found.numpy().tobytes() for found in of_all(comm, mask)}) == (1 if is_whole else comm.size), name
        assert 0.4 < mask.float().mean() < 0.6
    seen = [mask.flatten()[:100].numpy().tobytes() for mask in model.masks().values()]
    step(model, 6)
    seen += [mask.flatten()[:100].numpy().tobytes() for mask in model.masks().values()]
    assert len(set(seen)) == len(seen) == 2 * (2 + 2 * 9)  # each place of each step has other numbers


def test_the_same_seed_or_state_gives_the_same_bits(comm: Communicator, sequence: bool) -> None:
    model = made(comm, sequence=sequence)
    first = step(model)
    model(TOKENS)
    expected = model.masks()
    assert same(step(model), first)
    torch.set_rng_state(first[-1])  # as a checkpoint does
    model(TOKENS)
    assert all(torch.equal(mask, expected[name]) for name, mask in model.masks().items())


def _by_torch(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As transformers does: also the hooks of the block run again."""
    return checkpoint(block, x, use_reentrant=False)


def _whole_blocks(model: Model) -> None:
    mpitrain.checkpoint_activations(model)


def _regions(model: Model) -> None:
    mpitrain.checkpoint_activations(model, [part for block in model.blocks for part in (block.attention, block.mlp)])


def _within_regions(model: Model) -> None:
    mpitrain.checkpoint_activations(
        model, [part for block in model.blocks for part in (block.attention.scores, block.mlp.second)]
    )


def _parts_of_inputs(model: Model) -> None:
    mpitrain.checkpoint_activations(model, partition=True)


def _attention(model: Model) -> None:
    mpitrain.checkpoint_activations(model, what="attention", partition=True)


def _calls(model: Model) -> None:
    model.call = _by_torch


@pytest.mark.rest
@pytest.mark.parametrize("change", [_whole_blocks, _parts_of_inputs, _attention, _regions, _within_regions, _calls])
def test_activation_checkpointing_repeats_the_masks(
    comm: Communicator, sequence: bool, change: Callable[[Model], None]
) -> None:
    model = made(comm, sequence=sequence)
    expected = [step(model, seed) for seed in (5, 6)]
    change(model)
    for module in model.modules():
        if isinstance(module, Drop):
            module.masks.clear()
    assert all(same(step(model, seed), found) for seed, found in zip((5, 6), expected, strict=True))
    assert any(len(module.masks) > 2 for module in model.modules() if isinstance(module, Drop))  # it did compute again


def test_without_training_nothing_is_drawn(comm: Communicator, sequence: bool) -> None:
    torch.manual_seed(1)
    reference, model = Model().eval(), made(comm, sequence=sequence).eval()
    state = torch.get_rng_state()
    torch.testing.assert_close(model(TOKENS), reference(TOKENS), rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.get_rng_state(), state)
    model.blocks[0].mlp.first.train()  # a sample of the model's uncertainty
    torch.manual_seed(3)
    assert are_the_same(comm, model(TOKENS))
    assert not are_the_same(comm, model.blocks[0].mlp.first.masks[-1])


def test_one_rank_draws_what_a_plain_model_draws(comm: Communicator, sequence: bool) -> None:
    alone = comm.split(comm.rank)
    model = made(alone, sequence=sequence)
    torch.manual_seed(1)
    reference = Model()
    assert same(step(model), step(reference))
    alone.free()


def test_tokens_that_cannot_be_shared(comm: Communicator) -> None:
    """Without gradients they are whole on each rank, also in training mode."""
    model = made(comm, sequence=True)
    torch.manual_seed(3)
    with torch.no_grad():
        assert are_the_same(comm, model(TOKENS[:, :7]))
    masks = model.masks()
    assert are_the_same(comm, masks["blocks.0.stream"], masks["blocks.1.attention.after"])
    assert not are_the_same(comm, masks["blocks.1.attention.scores"])


class FailsError(Exception):
    pass


@pytest.mark.parametrize("place", ["attention.before", "attention.scores", "mlp.second", "stream"])
def test_an_exception_brings_the_common_state_back(comm: Communicator, sequence: bool, place: str) -> None:
    model = made(comm, sequence=sequence)
    expected = step(model)

    def fail(*_: Any) -> None:
        raise FailsError

    torch.manual_seed(5)
    with model.blocks[0].get_submodule(place).register_forward_hook(fail), pytest.raises(FailsError):
        model(TOKENS)
    assert are_the_same(comm, torch.get_rng_state())
    assert torch.initial_seed() == 5
    assert same(step(model), expected)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_block_that_is_a_region(comm: Communicator, is_cut: bool) -> None:
    """Gradients are those of the plain model, and masks in it differ."""
    torch.manual_seed(1)
    blocks = nn.ModuleList(MLP() for _ in range(2))
    plan = {key.removeprefix("blocks.*.mlp."): style for key, style in PLAN.items() if ".mlp." in key}
    whole = copy.deepcopy(blocks).eval()
    mpitrain.tensor_parallel(blocks, comm, {f"*.{key}": style for key, style in plan.items()}, sequence=False)
    stack = nn.Module()
    stack.blocks = copy.deepcopy(whole)
    mpitrain.tensor_parallel(stack, comm, {f"blocks.*.{key}": style for key, style in plan.items()}, sequence=is_cut)
    x = torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    for each in (stack.blocks.eval(), whole):
        y = x
        for block in each:
            y = block(y)
        y.square().sum().backward()
        if each is not whole:
            found, x.grad = x.grad, None
    torch.testing.assert_close(found, x.grad, rtol=1e-5, atol=1e-6)
    for block in stack.blocks.train():
        x = block(x)
    assert are_the_same(comm, x)
    assert not are_the_same(comm, stack.blocks[0].first.masks[-1])


TRANSFORMERS = {
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS,
        "resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2,
    }),
    "T5": ("T5ForConditionalGeneration", "T5Config", {
        "vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 4, "d_ff": 48, "num_layers": 2, "num_heads": HEADS,
        "dropout_rate": 0.2, "decoder_start_token_id": 0, "use_cache": False,
    }),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_local_experts": 4, "num_experts_per_tok": 2,
        "attention_dropout": 0.2,
    }),
}  # fmt: skip


@pytest.mark.rest
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_models_of_transformers(comm: Communicator, sequence: bool, name: str) -> None:
    """They train, their outputs agree on the ranks, and the library's activation checkpointing repeats the masks."""
    transformers = pytest.importorskip("transformers", minversion="5")
    kind, config, sizes = TRANSFORMERS[name]

    def losses(*, again: bool) -> list[float]:
        torch.manual_seed(1)
        model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).train()
        mpitrain.tensor_parallel(model, comm, sequence=sequence)
        if again:
            model.activation_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(5)
        found = []
        for _ in range(5):
            optimizer.zero_grad()
            output = model(input_ids=TOKENS, labels=TOKENS)
            output.loss.backward()
            assert are_the_same(comm, output.loss.detach(), torch.get_rng_state())
            optimizer.step()
            found.append(output.loss.item())
        return found

    expected = losses(again=False)
    assert expected[-1] < expected[0] - 0.3
    # Not the same bits: those of a plain GPT-2 or Mixtral differ, too. Other masks would change the second digit.
    assert losses(again=True) == pytest.approx(expected, rel=1e-5)
