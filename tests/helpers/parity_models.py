"""Small models of many kinds, each with a loss that is a mean over the rows of a batch: what test_parity.py shards."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sharded_models import BATCH, floats, loss_of
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from mpitrain.models import GPT, GPTConfig, Llama, LlamaConfig

os.environ["HF_HUB_OFFLINE"] = "1"  # transformers makes models from configurations here and downloads nothing

VOCAB = 13


@dataclass(frozen=True)
class Case:
    """`loss(model, step, rows)`: over those rows of the batch of that step. `blocks(model)`: what a user would shard first."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, slice], torch.Tensor]
    blocks: Callable[[nn.Module], list[nn.Module]]
    whole_batch: bool = False  # of every rank, since the rows of a batch depend on each other
    every_way: bool = False  # test_parity.py shards the model in all of WAYS; the other models in some
    lr: float = 3e-3  # of AdamW, as `eps`
    eps: float = 1e-4
    losses: tuple[float, float] = (1e-4, 1e-5)  # the relative and the absolute tolerance; test_parity.py says why
    grads: tuple[float, float] = (1e-3, 1e-5)


def tokens(step: int, length: int = 7) -> torch.Tensor:
    return torch.randint(0, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(step))


def language_loss(model: nn.Module, step: int, rows: slice) -> torch.Tensor:
    x = tokens(step)[rows]
    return cross_entropy(model(x[:, :-1]).float().flatten(0, 1), x[:, 1:].flatten())


def regression_loss(model: nn.Module, step: int, rows: slice) -> torch.Tensor:
    return (model(floats(step, 5)[rows]) - floats(step + 100, 3)[rows]).square().mean()


def mlp() -> nn.Module:
    """Sizes that no number of ranks divides, some smaller than it."""
    body = [nn.Sequential(nn.Linear(7, 11), nn.GELU(), nn.Linear(11, 7)) for _ in range(3)]
    return nn.Sequential(nn.Linear(5, 7), *body, nn.Linear(7, 1), nn.Tanh(), nn.Linear(1, 3))


def gpt(*, tied: bool) -> nn.Module:
    return GPT(GPTConfig(vocab=VOCAB, context=8, width=12, layers=2, heads=3, tied=tied))


def our_llama() -> nn.Module:
    """Its blocks take an object that is no tensor, the rotation of positions."""
    return Llama(LlamaConfig(vocab=VOCAB, context=8, width=12, layers=2, heads=3, kv_heads=1))


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
        self.embedding = nn.Embedding(VOCAB, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(6, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Residual(nn.Module):
    """A layer as transformers have them, of the width 6."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class Convolutions(nn.Module):
    """A small residual net with batch norms, whose statistics couple the rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 5, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(5, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU()) for _ in range(2)
        )
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = x + stage(x)
        return self.head(x.mean((2, 3)))


def frozen_statistics() -> nn.Module:
    """Batch norms that use and keep the statistics they have, so that rows do not depend on each other."""
    model = Convolutions().eval()
    for stage in model.stages:
        nn.init.normal_(stage[1].running_mean)
    return model


def image_loss(model: nn.Module, step: int, rows: slice) -> torch.Tensor:
    return cross_entropy(model(floats(step, 2, 6, 6)[rows]), tokens(step, 1)[rows, 0] % 3)


class Experts(nn.Module):
    """Each row goes to one expert, so that an expert often gets none on a rank, and some get none on any."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.router = nn.Linear(7, 9)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(7, 5), nn.GELU(), nn.Linear(5, 7)) for _ in range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(self.norm(x)).softmax(-1)
        weight, choice = weights.max(-1)
        y = x.clone()
        for index, expert in enumerate(self.experts):
            if (chosen := choice == index).any():
                y[chosen] = y[chosen] + weight[chosen, None] * expert(self.norm(x[chosen]))
        return y


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class UNet(nn.Module):
    """Lists of lists, as diffusion models keep their stages: who holds them calls what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.down = nn.ModuleList(nn.ModuleList([self.block(), nn.Linear(8, 8)]) for _ in range(2))
        self.up = nn.ModuleList(nn.ModuleList([nn.Linear(16, 8), self.block(), self.block()]) for _ in range(2))
        self.ends = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 3)]) for _ in range(2))

    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, passed = self.first(x), []
        for block, down in self.down:
            x = down(x + block(x))
            passed.append(x)
        for up, *blocks in self.up:
            x = up(torch.cat([x, passed.pop()], -1))
            for block in blocks:
                x = x + block(x)
        return sum(last(middle(x).tanh()) for middle, last in self.ends)


class EncoderDecoder(nn.Module):
    """One embedding for source, target and logits; every decoder layer looks at the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8)
        layer = {"d_model": 8, "nhead": 2, "dim_feedforward": 9, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(**layer) for _ in range(2))
        self.head = nn.Linear(8, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        source = self.embedding(x.flip(1))
        for layer in self.encoder:
            source = layer(source)
        target = self.embedding(x)
        for layer in self.decoder:
            target = layer(target, source)
        return self.head(target)


class LowRank(nn.Module):
    """A frozen matrix and a trained difference to it (Hu et al. 2021, LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def low_rank_gpt() -> nn.Module:
    model = gpt(tied=True).requires_grad_(False)
    for block in model.blocks:
        block.attn.qkv = LowRank(block.attn.qkv)
        block.mlp.fc = LowRank(block.mlp.fc)
    return model


class Twice(nn.Module):
    """A GPT's blocks, all of them run twice in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = gpt(tied=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body.wte(x)
        for block in (*self.body.blocks, *self.body.blocks):
            x = block(x)
        return self.body.head(self.body.ln_f(x))


class Checkpointed(nn.Module):
    """A GPT that computes the activations of each block again in the backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.body = gpt(tied=False)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body.wte(x)
        for block in self.body.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.body.head(self.body.ln_f(x))


class Recurrent(nn.Module):
    """torch's recurrent modules keep references to their parameters in a list of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 6)
        self.lstm = nn.LSTM(6, 7, num_layers=2, batch_first=True)
        self.gru = nn.GRU(7, 5, batch_first=True)
        self.head = nn.Linear(5, VOCAB)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.embedding(x))
        x, _ = self.gru(x)
        return self.head(x)


def llama(*, checkpointing: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=12, intermediate_size=15, num_hidden_layers=2, num_attention_heads=3,
            num_key_value_heads=1, max_position_embeddings=8,
        )
    )  # fmt: skip
    if checkpointing:
        model.activation_checkpointing_enable()
    return model


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    numbers = {"vocab_size": VOCAB, "n_positions": 8, "n_embd": 12, "n_layer": 2, "n_head": 3}
    return GPT2LMHeadModel(GPT2Config(**numbers, **still, bos_token_id=0, eos_token_id=0))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB, d_model=12, d_kv=4, d_ff=15, num_layers=2, num_heads=3, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def transformers_loss(model: nn.Module, step: int, rows: slice) -> torch.Tensor:
    x = tokens(step)[rows]
    return model(input_ids=x, labels=x).loss


def t5_loss(model: nn.Module, step: int, rows: slice) -> torch.Tensor:
    return model(input_ids=tokens(step)[rows], labels=tokens(step + 100, 5)[rows]).loss


# fp32 sums over few rows of small layers, and a rate so high that little of a difference would stay hidden
STRICT: dict[str, Any] = {"every_way": True, "lr": 1e-2, "eps": 1e-8, "losses": (1e-5, 1e-6), "grads": (1e-4, 1e-6)}

CASES = {
    "odd": Case(Odd, loss_of, lambda model: [model.first, model.twice], **STRICT),
    "tied": Case(Tied, language_loss, lambda model: [*model.blocks], **STRICT),
    "mlp": Case(mlp, regression_loss, lambda model: [*model[1:4]]),
    "gpt, tied": Case(lambda: gpt(tied=True), language_loss, lambda model: [*model.blocks]),
    "gpt, untied": Case(
        lambda: gpt(tied=False), language_loss, lambda model: [*model.blocks, model.wte, model.head]
    ),
    "convolutions": Case(Convolutions, image_loss, lambda model: [*model.stages], whole_batch=True),
    "convolutions, frozen statistics": Case(
        frozen_statistics, image_loss, lambda model: [model.stem, *model.stages]
    ),
    "mixture of experts": Case(Mixture, regression_loss, lambda model: [*model.layers]),
    "U-Net": Case(UNet, regression_loss, lambda model: [block for stage in (*model.down, *model.up) for block in stage]),
    "encoder and decoder": Case(
        EncoderDecoder, language_loss, lambda model: [*model.encoder, *model.decoder]
    ),
    "low rank": Case(low_rank_gpt, language_loss, lambda model: [*model.blocks]),
    "twice": Case(Twice, language_loss, lambda model: [*model.body.blocks]),
    "checkpointed": Case(lambda: Checkpointed(reentrant=False), language_loss, lambda model: [*model.body.blocks]),
    "checkpointed, reentrant": Case(
        lambda: Checkpointed(reentrant=True), language_loss, lambda model: [*model.body.blocks]
    ),
    "recurrent": Case(Recurrent, language_loss, lambda model: [model.lstm, model.gru]),
    "Llama": Case(llama, transformers_loss, lambda model: [*model.model.layers]),
    "Llama, checkpointed": Case(
        lambda: llama(checkpointing=True), transformers_loss, lambda model: [*model.model.layers]
    ),
    "GPT-2": Case(gpt2, transformers_loss, lambda model: [*model.transformer.h]),
    "T5": Case(t5, t5_loss, lambda model: [*model.encoder.block, *model.decoder.block]),
    "our Llama": Case(our_llama, language_loss, lambda model: [*model.blocks]),
}  # fmt: skip
