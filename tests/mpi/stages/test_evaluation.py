"""Evaluation and sampling through a pipeline: the loss has the bits of the plain model's, and the sampled text is the same."""

from collections.abc import Callable

import pytest
import torch
from extent import extent

import mpitrain
from collectives import Communicator
from mpitrain.models import GPT, GPTConfig, LanguageModel, generate
from mpitrain.models.llama import Llama
from mpitrain.models.sizes import LlamaConfig
from mpitrain.stages import pipeline

MICRO, CONTEXT = 8, 16
SIZES = {"vocab": 50, "context": CONTEXT, "width": 24, "layers": 8, "heads": 2}
SCHEDULES = extent(["1f1b", "interleaved", "zb-v"], ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])


def gpt() -> LanguageModel:
    model = GPT(GPTConfig(**SIZES, tied=False))
    mpitrain.initialize(model)
    return model


def llama() -> LanguageModel:
    model = Llama(LlamaConfig(**SIZES, tied=True))
    mpitrain.initialize(model)
    return model


def rows(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(0, 50, (2, 8 + micro % 3), generator=generator) for micro in range(count)]


def same_as_the_plain_model(
    comm: Communicator, make: Callable[[], LanguageModel], schedule: str, *, zero: int | None = None
) -> None:
    mesh = mpitrain.mesh(comm, pp=comm.size if zero is None else 2)
    plain, model = make(), make()
    pipe = pipeline(model, mesh["pp"], schedule, micro_batches=MICRO)
    if zero is not None:
        for block in model.blocks.children():
            mpitrain.fully_shard(block, mesh, stage=zero)
        mpitrain.fully_shard(model, mesh, stage=zero)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, model)]
    for _ in range(2):
        for count in (1, 3, MICRO, 2 * MICRO + 1):
            tokens = rows(count)
            with torch.no_grad():
                expected = [plain(each, each.roll(-1, 1)).item() for each in tokens]
            losses = pipe.evaluate(tokens, last=[{"targets_BL": each.roll(-1, 1)} for each in tokens])
            assert losses.dtype == torch.float64
            assert losses.tolist() == expected
        assert all(param.grad is None for param in model.parameters())
        for temperature in (0.0, 0.9):
            texts = [
                generate(
                    function,
                    torch.tensor([3, 1, 4]),
                    num=14,
                    context=CONTEXT,
                    temperature=temperature,
                    generator=torch.Generator().manual_seed(5),
                )
                for function in (plain, pipe.next_logits)
            ]
            assert texts[0].tolist() == texts[1].tolist()
            assert len(texts[0].unique()) > 4 or temperature == 0
        if zero is not None or make is llama:
            break  # after a step the weights differ by rounding
        tokens = rows(MICRO)
        for each in tokens:
            plain(each, each.roll(-1, 1)).backward()
        pipe.step(tokens, last=[{"targets_BL": each.roll(-1, 1)} for each in tokens])
        whole = dict(plain.named_parameters())
        with torch.no_grad():
            for name, param in model.named_parameters():
                assert param.grad is not None
                param.grad.copy_(whole[name].grad)  # type: ignore[arg-type]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    mesh.free()


@pytest.mark.rest
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_loss_and_the_text_are_those_of_the_plain_model(comm: Communicator, schedule: str) -> None:
    same_as_the_plain_model(comm, gpt, schedule)


@pytest.mark.rest
@pytest.mark.ranks(2)
def test_a_tied_model(comm: Communicator) -> None:
    same_as_the_plain_model(comm, llama, "1f1b")


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("schedule", "zero"), extent([("1f1b", 3), ("zb-v", 3)], [(each, z) for each in SCHEDULES for z in (1, 2, 3)])
)
def test_a_sharded_model(comm: Communicator, schedule: str, zero: int) -> None:
    same_as_the_plain_model(comm, gpt, schedule, zero=zero)


@pytest.mark.ranks(2)
def test_transformers(comm: Communicator) -> None:
    pytest.importorskip("transformers", minversion="5")
    from tiny_transformers import tiny

    plain, model = tiny("llama", num_hidden_layers=4).eval(), tiny("llama", num_hidden_layers=4).eval()
    pipe = pipeline(model, comm, micro_batches=2)
    options = {"num": 8, "context": 12, "generator": torch.Generator().manual_seed(2)}
    expected = generate(lambda tokens: plain(tokens).logits, torch.tensor([3, 1]), **options)
    options["generator"] = torch.Generator().manual_seed(2)
    assert generate(pipe.next_logits, torch.tensor([3, 1]), **options).tolist() == expected.tolist()


@pytest.mark.ranks(2)
def test_what_does_not_fit(comm: Communicator) -> None:
    pipe = pipeline(gpt(), comm, micro_batches=MICRO)
    with pytest.raises(ValueError, match="evaluate: expected at least one micro-batch, got none"):
        pipe.evaluate([])
    with pytest.raises(ValueError, match=r"evaluate: expected 3 micro-batches, got 2 \(last\)"):
        pipe.evaluate(rows(3), last=[{}] * 2)
    if comm.size > 1:
        with pytest.raises(ValueError, match="the same number of micro-batches on all ranks, got"):
            pipe.evaluate(rows(1 + comm.rank))
