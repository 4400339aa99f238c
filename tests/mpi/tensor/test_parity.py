"""A model cut over ranks, alone and with ZeRO, trains as one plain process does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from extent import extent

import ckpt
import mpitrain
from collectives import Communicator, Mesh
from mpitrain.models import GPTConfig, LanguageModel, LlamaConfig, TransformerConfig, build
from mpitrain.placement.parts import part_of
from mpitrain.weights.initial_values import initialize

STEPS = extent(5, 10)
NUM_HEADS = 12  # which 2, 3 and 4 ranks share equally
LENGTH = 24


NUMBERS: dict[str, Any] = {"vocab": 101, "context": LENGTH, "width": 48, "layers": 3, "heads": NUM_HEADS}
UNTIED = GPTConfig(**NUMBERS, tied=False)
TIED = GPTConfig(**NUMBERS, tied=True)


def grouped(num_ranks: int) -> LlamaConfig:
    """A Llama in which two or three ranks share each head of keys, if `num_ranks` hold each layer together."""
    return LlamaConfig(**NUMBERS, kv_heads=num_ranks // 2)


def plain(config: TransformerConfig, *, seed: int = 1) -> LanguageModel:
    model = build(config)
    initialize(model, seed=seed)
    return model


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)


def batches(num_sequences: int, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(0, 101, (num_sequences, LENGTH + 1), generator=generator)
        yield rows[:, :-1], rows[:, 1:]


class Figures(NamedTuple):
    losses: list[float]
    norms: list[float]


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    num_sequences: int,
    data: Communicator | None = None,
    *,
    steps: int = STEPS,
    seed: int = 0,
) -> Figures:
    """Train; each rank of `data` has its part of each batch."""
    found = Figures([], [])
    source = batches(num_sequences, seed)
    for _ in range(steps):
        x, y = next(source)
        if data is not None:
            x, y = (rows.chunk(data.size)[data.rank] for rows in (x, y))
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        norm = mpitrain.clip_grad_norm_(model, 0.5)
        optimizer.step()
        mean = loss.detach().double().reshape(1)
        if data is not None:
            data.all_reduce(mean, "avg")
        found.losses.append(mean.item())
        found.norms.append(norm.item())
    return found


def near(found: Figures, expected: Figures) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)


class Layout(NamedTuple):
    """A mesh, and how the model is sharded over it."""

    tp: int
    sequence: bool
    stage: int | None = None  # None: not by fully_shard
    storage: Any = "auto"
    copies: int = 1
    meta: bool = False

    def make(self, comm: Communicator, config: TransformerConfig) -> tuple[LanguageModel, Mesh]:
        mesh = mpitrain.mesh(comm, tp=self.tp, dp_replicate=self.copies)
        with torch.device("meta" if self.meta else "cpu"):
            model = build(config)
        mpitrain.tensor_parallel(model, mesh["tp"], sequence=self.sequence)
        if self.stage is not None:
            for module in (*model.blocks, model):
                mpitrain.fully_shard(module, mesh, stage=self.stage, storage=self.storage)  # type: ignore[arg-type]
        initialize(model, seed=1)
        return model, mesh


# Each stage, and both kinds of memory below and from stage 2 on. The last three of `layouts` add private memory in stage 2.
SHARDED = extent(
    [(0, "auto"), (1, "private"), (2, "auto"), (3, "private")],
    [(stage, storage) for stage in (0, 1, 2, 3) for storage in ("auto", "private")],
)


def layouts(num_ranks: int) -> list[Layout]:
    found = [
        Layout(num_ranks, sequence, stage, meta=sequence and stage is None)
        for sequence in (False, True)
        for stage in (None, 3)
    ]
    if num_ranks == 4:
        found += [
            *(Layout(2, True, stage, storage) for stage, storage in SHARDED),
            Layout(2, False, 3),
            Layout(2, True, 2, "private", copies=2, meta=True),
            Layout(2, True, 3, meta=True),
        ]
    return found


@pytest.fixture(params=["untied", "tied", "Llama"])
def config(request: pytest.FixtureRequest, comm: Communicator) -> TransformerConfig:
    return {"untied": UNTIED, "tied": TIED, "Llama": grouped(comm.size)}[request.param]


def whole_model(model: LanguageModel, path: Path) -> LanguageModel:
    """The weights of a cut model in a plain one, through a checkpoint."""
    mpitrain.save(path, model, overwrite=True)
    found = plain(model.config, seed=7)
    mpitrain.load(path, found)
    return found


@pytest.mark.rest
@pytest.mark.ranks(2, 3, 4)
def test_steps_of_each_layout(comm: Communicator, shared_tmp: Path, config: TransformerConfig) -> None:
    reference = plain(config)
    expected = train(reference, optimizer_of(reference), 4)
    for layout in layouts(comm.size)[:: 1 if config is UNTIED else 3]:
        model, mesh = layout.make(comm, config)
        near(train(model, optimizer_of(model), 4, mesh["dp_replicate", "dp_shard", "cp"]), expected)
        found = whole_model(model, shared_tmp / "after")
        for (name, left), right in zip(found.named_parameters(), reference.parameters(), strict=True):
            assert (left - right).abs().max() <= 2e-5, f"{layout}: {name}"
        mesh.free()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_and_bytes_of_each_part(comm: Communicator, sequence: bool, config: TransformerConfig) -> None:
    """Also: each cut matrix takes 1/N of its bytes, and initial values are the plain model's, bit for bit."""
    reference, (model, mesh) = plain(config), Layout(comm.size, sequence).make(comm, config)
    x, y = next(batches(2))
    for each in (reference, model):
        each(x, y).backward()
    num_cut = 0
    for (name, whole), mine in zip(reference.named_parameters(), model.parameters(), strict=True):
        part = part_of(mine)
        assert part is not None and whole.grad is not None and mine.grad is not None
        assert torch.equal(part.take(whole), mine), name
        assert (part.take(whole.grad) - mine.grad).abs().max() <= 1e-5 * whole.grad.abs().max(), name
        if whole.ndim == 2 and name != "wpe.weight":
            num_cut += 1
            num_sharing = part.copies.size if part.copies is not None else 1
            assert num_sharing == (comm.size // config.kv_heads if ".kv." in name else 1), name  # type: ignore[attr-defined]
            fair, row = whole.numel() / comm.size * num_sharing, whole.numel() / whole.shape[part.dim]
            assert abs(mine.numel() - fair) <= len(part.boxes) * row, name  # 3 ranks do not divide 101 tokens
    assert num_cut == (4 if isinstance(config, GPTConfig) else 5) * 3 + (1 if config.tied else 2)
    mesh.free()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_checkpoint_of_each_layout_continues_under_each_other(
    comm: Communicator, shared_tmp: Path, family: str
) -> None:
    some = [
        Layout(2, True, 3),
        Layout(4, True),
        Layout(1, False, 3),
        Layout(2, False, 0),
        Layout(2, True, 2, "private", copies=2),
    ][: 2 if family == "llama" else None]
    config = grouped(comm.size) if family == "llama" else UNTIED
    reference = plain(config)
    optimizer = optimizer_of(reference)
    train(reference, optimizer, 4, steps=3)
    expected = train(reference, optimizer, 4, steps=3, seed=5)
    made = [layout.make(comm, config) for layout in some]
    for number, (model, mesh) in enumerate(made):
        initialize(model, seed=1)
        optimizer = optimizer_of(model)
        train(model, optimizer, 4, mesh["dp_replicate", "dp_shard", "cp"], steps=3)
        mpitrain.save(shared_tmp / "saved", model, optimizer, overwrite=True)
        # A checkpoint has whole tensors, so what each layout writes and what each reads show every fault once.
        for other, other_mesh in extent([made[number - 1]], made):
            loaded = optimizer_of(other)
            mpitrain.load(shared_tmp / "saved", other, loaded)
            near(train(other, loaded, 4, other_mesh["dp_replicate", "dp_shard", "cp"], steps=3, seed=5), expected)
        alone = plain(config, seed=7)
        loaded = optimizer_of(alone)
        mpitrain.load(shared_tmp / "saved", alone, loaded)
        near(train(alone, loaded, 4, steps=3, seed=5), expected)
    for _, mesh in made:
        mesh.free()


@pytest.mark.ranks(4)
def test_a_checkpoint_tells_which_axes_cut_a_tensor(comm: Communicator, shared_tmp: Path) -> None:
    model, mesh = Layout(2, True, 3).make(comm, UNTIED)
    mpitrain.save(shared_tmp / "saved", model)
    there = ckpt.open(shared_tmp / "saved")
    axes = {
        name: there[f"model/{name}"].axes
        for name in ("blocks.0.attn.qkv.weight", "blocks.0.mlp.proj.weight", "ln_f.weight")
    }
    assert axes == {
        "blocks.0.attn.qkv.weight": ("tp,dp_shard", None),
        "blocks.0.mlp.proj.weight": ("dp_shard", "tp"),
        "ln_f.weight": ("dp_shard",),
    }
    mesh.free()


@pytest.mark.ranks(4)
def test_shared_heads_are_cut_only_if_there_are_several(comm: Communicator, shared_tmp: Path) -> None:
    mesh = mpitrain.mesh(comm, tp=4)
    for kv_heads, cuts in ((1, None), (2, "tp")):
        model = build(LlamaConfig(**NUMBERS | {"layers": 1}, kv_heads=kv_heads))
        mpitrain.fully_shard(mpitrain.tensor_parallel(model, mesh["tp"]), mesh)
        initialize(model, seed=1)
        mpitrain.save(shared_tmp / "saved", model, overwrite=True)
        there = ckpt.open(shared_tmp / "saved")
        assert there["model/blocks.0.attn.kv.weight"].axes == (cuts, None)
        assert there["model/blocks.0.attn.q.weight"].axes == ("tp", None)  # one rank of dp_shard cuts nothing
    mesh.free()


@pytest.mark.ranks(2)
def test_logits_of_any_length_are_whole(comm: Communicator, config: TransformerConfig) -> None:
    """Without gradients the tokens need not divide by the ranks."""
    reference, (model, mesh) = plain(config), Layout(2, True, 3).make(comm, config)
    x, y = next(batches(2))
    with torch.no_grad():
        for length in (1, 7, LENGTH):
            torch.testing.assert_close(model(x[:, :length]), reference(x[:, :length]), rtol=1e-5, atol=1e-6)
    with pytest.raises(
        ValueError, match="7 tokens cannot be shared equally by 2 ranks; pad the sequences to a multiple of 2"
    ):
        model(x[:, :7], y[:, :7])
    near(Figures([model(x, y).item()], []), Figures([reference(x, y).item()], []))
    mesh.free()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [None, 3])
def test_a_thawed_parameter_trains(comm: Communicator, stage: int | None) -> None:
    """The gradients of norms between regions are sums over the ranks, of parameters that were frozen first, too."""
    reference = plain(UNTIED)
    for name, param in reference.named_parameters():
        param.requires_grad_("ln" not in name)
    mesh = mpitrain.mesh(comm, tp=2)
    model = plain(UNTIED)
    for name, param in model.named_parameters():
        param.requires_grad_("ln" not in name)
    mpitrain.tensor_parallel(model, mesh["tp"])
    if stage is not None:
        mpitrain.fully_shard(model, mesh, stage=stage)
    optimizers = [optimizer_of(each) for each in (reference, model)]
    near(train(model, optimizers[1], 2, steps=2), train(reference, optimizers[0], 2, steps=2))
    for each in (reference, model):
        for param in each.parameters():
            param.requires_grad_(True)
    near(train(model, optimizers[1], 2, steps=4), train(reference, optimizers[0], 2, steps=4))
    mesh.free()


@pytest.mark.rest
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("stage", [None, 3])
def test_weights_come_and_go_whole(
    comm: Communicator, shared_tmp: Path, stage: int | None, config: TransformerConfig
) -> None:
    """Full state dicts, and safetensors files, of a cut model are those of the plain one, bit for bit."""
    reference, (model, mesh) = (
        plain(config),
        Layout(comm.size if stage is None else 2, True, stage).make(comm, config),
    )
    expected = reference.state_dict()
    found = mpitrain.full_state_dict(model)
    assert found.keys() == (expected.keys() if comm.rank == 0 else set())
    assert all(torch.equal(found[name], expected[name]) for name in found)
    mpitrain.export_weights(model, shared_tmp / "weights", overwrite=True)
    for load in (
        lambda: mpitrain.load_weights(model, shared_tmp / "weights"),
        lambda: mpitrain.load_full_state_dict(model, expected if comm.rank == 0 else {}),
    ):
        initialize(model, seed=9)
        load()
        for name, param in model.named_parameters():
            part = part_of(param)
            assert part is not None
            if stage is None:
                assert torch.equal(param, part.take(expected[name])), name
        near(Figures([model(*next(batches(2))).item()], []), Figures([reference(*next(batches(2))).item()], []))
    mesh.free()


@pytest.mark.rest
@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_optimizers_and_counts_know_the_parts(comm: Communicator, stage: int, config: TransformerConfig) -> None:
    reference, (model, mesh) = plain(config), Layout(2, True, stage).make(comm, config)
    assert mpitrain.num_parameters(model) == sum(param.numel() for param in reference.parameters())
    model(*next(batches(2))).backward()
    whole_matrices = type("Muon", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="Muon needs whole matrices"):
        whole_matrices.step()
    mesh.free()


@pytest.mark.rest
@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", [GPTConfig, LlamaConfig])
def test_heads_that_the_ranks_cannot_share_equally(
    comm: Communicator, sequence: bool, kind: type[TransformerConfig]
) -> None:
    """One rank has one head, the other two."""
    sizes = kind(vocab=101, context=LENGTH, width=48, layers=2, heads=3, tied=False)
    reference, model = plain(sizes), build(sizes)
    mesh = mpitrain.mesh(comm, tp=2)
    mpitrain.tensor_parallel(model, mesh["tp"], sequence=sequence)
    mpitrain.fully_shard(model, mesh)
    initialize(model, seed=1)
    near(train(model, optimizer_of(model), 2, mesh["dp_shard"]), train(reference, optimizer_of(reference), 2))
    mesh.free()
