"""A transformer in numbers: this library's own, named public ones, and those of a transformers `config.json`."""

import difflib
import json
import reprlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from collectives.files import read_regular
from collectives.texts import shown
from mpitrain.models.sizes import RMS_EPS, SIZES, LlamaConfig, TransformerConfig, resolve

_MOST_BYTES = 16 << 20  # of a config.json
_MOST, _MOST_LAYERS = 1 << 31, 4096  # of its numbers


@dataclass(frozen=True)
class Transformer:
    """What the price of a decoder-only transformer depends on."""

    name: str
    layers: int
    width: int
    heads: int
    vocab: int
    context: int
    """Tokens of a sequence."""
    kv_heads: int
    head_width: int
    inner: int
    """Width of the feed-forward layer, or of one expert."""
    gated: bool = False
    """The feed-forward layer has three matrices."""
    tied: bool = True
    positions: int = 0
    """Learned positions."""
    vectors: int = 0
    """Parameters of a block's norms and biases."""
    experts: int = 1
    """Feed-forward layers of a block."""
    experts_per_token: int = 1
    trains: tuple[str, str] | None = None
    """Family and size in the trainer's settings; None: the trainer lacks the model."""

    @property
    def has_rms_norms(self) -> bool:
        """Norms without biases; these models also have rotary positions."""
        return self.vectors <= 2 * self.width

    @property
    def attention_matrices(self) -> int:
        """Parameters of a block's four matrices around the attention."""
        return self.width * self.head_width * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_matrices(self) -> int:
        """Parameters of one feed-forward layer."""
        return (3 if self.gated else 2) * self.width * self.inner

    @property
    def block_parameters(self) -> int:
        router = self.experts * self.width if self.experts > 1 else 0
        return self.attention_matrices + self.experts * self.expert_matrices + router + self.vectors

    @property
    def parameters(self) -> int:
        """All parameters; tied ones count once."""
        embeddings = self.vocab * self.width * (1 if self.tied else 2) + self.positions * self.width
        last_norm = self.width * (1 if self.has_rms_norms else 2)
        return self.layers * self.block_parameters + embeddings + last_norm

    @property
    def flops_per_token(self) -> int:
        """Forward and backward, for the model's FLOP/s utilisation: as `mpitrain.models.flops_per_token`, with the experts in use."""
        idle = (self.experts - self.experts_per_token) * self.expert_matrices * self.layers
        looked_up = self.positions * self.width + (0 if self.tied else self.vocab * self.width)
        attention = 12 * self.layers * self.heads * self.head_width * self.context
        return 6 * (self.parameters - looked_up - idle) + attention


def find(name: str, context: int | None = None) -> Transformer:
    """A model by name, or by the path of a `config.json` or its folder. `context`: tokens of a sequence, instead of the model's.

    Raises:
        ValueError: an unknown name, or a file that does not describe a decoder-only transformer.
    """
    path = Path(name)
    if name in NAMED:
        model = NAMED[name]
    elif path.exists():
        model = from_config(path / "config.json" if path.is_dir() else path)
    else:
        near = difflib.get_close_matches(name, NAMED, n=1)
        hint = (
            f"did you mean {near[0]}?" if near else f"expected one of {', '.join(NAMED)}, or the path of a config.json"
        )
        raise ValueError(f"unknown model {name!r}: {hint}")
    if context is None or context == model.context:
        return model
    # Learned positions grow with the context, as in the trainer.
    return replace(model, context=context, positions=context if model.positions else 0)


def of_sizes(name: str, config: TransformerConfig, trains: tuple[str, str] | None) -> Transformer:
    """A model of this library."""
    width = config.width
    if isinstance(config, LlamaConfig):
        kv_heads, inner, vectors, gated, positions = config.kv_heads, config.inner, 2 * width, True, 0
    else:
        kv_heads, inner, vectors, gated, positions = config.heads, 4 * width, 13 * width, False, config.context
    return Transformer(
        name=name,
        layers=config.layers,
        width=width,
        heads=config.heads,
        vocab=config.vocab,
        context=config.context,
        kv_heads=kv_heads,
        head_width=width // config.heads,
        inner=inner,
        gated=gated,
        tied=config.tied,
        positions=positions,
        vectors=vectors,
        trains=trains,
    )


def gpt(name: str, layers: int, width: int, heads: int, *, vocab: int = 51200, context: int = 2048) -> Transformer:
    """A GPT as in the papers of Megatron-LM."""
    config = resolve("xl", layers=layers, width=width, heads=heads, vocab=vocab, context=context)
    return of_sizes(name, config, None)


_PLAIN = {
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "opt",
    "bloom",
    "falcon",
    "phi",
    "codegen",
    "gpt_bigcode",
    "starcoder2",
    "mpt",
}
"""The types of transformers models whose feed-forward layer has two matrices."""


_ENCODERS = {
    "albert",
    "bert",
    "clip",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "roberta",
    "vit",
    "xlm-roberta",
}


def _refused(config: dict[str, Any]) -> str:
    """Why the numbers of a `Transformer` cannot describe this model; empty if they can."""
    kind = str(config.get("model_type", ""))
    if config.get("is_encoder_decoder"):
        return "expected a decoder-only model, got an encoder and a decoder"
    if kind in _ENCODERS:
        return f"expected a decoder-only model, got the encoder {kind}"
    if config.get("kv_lora_rank"):
        return "kv_lora_rank: multi-head latent attention cannot be planned"
    if config.get("n_shared_experts") or config.get("shared_expert_intermediate_size") or kind == "qwen2_moe":
        return "experts that all tokens share cannot be planned"
    # Transformers' default of these two models is multi-query attention.
    if kind in ("falcon", "gpt_bigcode") and (
        config.get("multi_query", True) or config.get("new_decoder_architecture")
    ):
        return f"multi_query or new_decoder_architecture: the attention of this {kind} cannot be planned"
    return ""


def from_config(path: Path) -> Transformer:
    """A model of a transformers `config.json`. ValueError for a file without the numbers of a decoder-only transformer."""
    try:
        config = json.loads(read_regular(path, _MOST_BYTES, links=True))
    except RecursionError:
        raise ValueError(f"model file {path}: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"model file {path}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(config, dict):
        raise ValueError(
            f"model file {path}: expected the settings of a transformers model, got {type(config).__name__}"
        )
    config = config.get("text_config") or config  # of a model of several modalities
    if not isinstance(config, dict):
        raise ValueError(
            f"model file {path}: text_config: expected the settings of a model, got {reprlib.repr(config)}"
        )
    if refused := _refused(config):
        raise ValueError(f"model file {path}: {refused}")

    def number(*names: str, default: int | None = None, most: int = _MOST) -> int:
        for name in names:
            if (value := config.get(name)) is not None:
                if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                    raise ValueError(
                        f"model file {path}: {name}: expected a whole number from 1 to {most}, got {reprlib.repr(value)}"
                    )
                return value
        if default is None:
            raise ValueError(f"model file {path}: {' or '.join(names)} is missing")
        return default

    kind = str(config.get("model_type", ""))
    plain = kind in _PLAIN
    width = number("hidden_size", "n_embd", "d_model")
    heads = number("num_attention_heads", "n_head", "n_heads", "num_heads")
    context = number("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", default=2048)
    experts = number("num_local_experts", "num_experts", "n_routed_experts", default=1)
    inner = number("intermediate_size", "n_inner", "ffn_dim", default=4 * width)
    kv_heads = number("num_key_value_heads", default=heads)
    experts_per_token = number("num_experts_per_tok", "top_k", default=1) if experts > 1 else 1
    if heads % kv_heads:
        raise ValueError(f"model file {path}: num_key_value_heads: expected a divisor of {heads} heads, got {kv_heads}")
    if experts_per_token > experts:
        raise ValueError(
            f"model file {path}: num_experts_per_tok: expected at most {experts} experts, got {experts_per_token}"
        )
    made = Transformer(
        name=shown(str(config.get("_name_or_path") or path.resolve().parent.name or kind)[:200]),
        layers=number("num_hidden_layers", "n_layer", "n_layers", "num_layers", most=_MOST_LAYERS),
        width=width,
        heads=heads,
        vocab=number("vocab_size"),
        context=context,
        kv_heads=kv_heads,
        head_width=number("head_dim", default=width // heads),
        inner=number("moe_intermediate_size", default=inner) if experts > 1 else inner,
        gated=not plain,
        tied=bool(config.get("tie_word_embeddings", plain or kind.startswith("gemma"))),
        positions=context if kind in ("gpt2", "gpt_neo", "opt", "gpt_bigcode") else 0,
        vectors=(13 if plain else 2) * width,
        experts=experts,
        experts_per_token=experts_per_token,
    )
    return replace(made, trains=_own_size(made, config))


def _own_size(model: Transformer, config: dict[str, Any]) -> tuple[str, str] | None:
    """The family and size of this library with the same numbers, also those that no price depends on; None without one."""
    rope = config.get("rope_parameters") or config
    if not isinstance(rope, dict) or config.get("rms_norm_eps", 1e-6) != RMS_EPS:  # 1e-6 is transformers' default
        return None
    others = config.get("attention_bias") or config.get("mlp_bias") or config.get("hidden_act", "silu") != "silu"
    if (
        config.get("model_type") != "llama"
        or config.get("rope_scaling")
        or rope.get("rope_type", "default") != "default"
        or others
    ):
        return None
    for size in SIZES["llama"]:
        own, numbers = NAMED[f"llama-{size}"], resolve(size, "llama")
        same = replace(model, name=own.name, context=own.context, trains=own.trains) == own
        if same and isinstance(numbers, LlamaConfig) and rope.get("rope_theta", 10000.0) == numbers.theta:
            return own.trains
    return None


def _named() -> dict[str, Transformer]:
    own = {
        f"{family}-{size}": of_sizes(f"{family}-{size}", resolve(size, family), (family, size))
        for family, sizes in SIZES.items()
        for size in sizes
    }
    same = {"llama3.2-1b": "1b", "llama2-7b": "7b", "llama3-8b": "8b", "llama3-70b": "70b"}
    public = {name: replace(own[f"llama-{size}"], name=name) for name, size in same.items()}
    # Table 3 of 2407.21783.
    public["llama3-405b"] = replace(
        public["llama3-70b"],
        name="llama3-405b",
        layers=126,
        width=16384,
        heads=128,
        inner=53248,
        vectors=2 * 16384,
        trains=None,
    )
    # GPT-3 (2005.14165, table 2.1) as Narayanan et al. trained it (2104.04473, section 5.1), and two more of their models.
    public["gpt3-175b"] = gpt("gpt3-175b", 96, 12288, 96)
    public["gpt-530b"] = gpt("gpt-530b", 105, 20480, 128)
    public["gpt-1t"] = gpt("gpt-1t", 128, 25600, 160)
    # mistralai/Mixtral-8x7B-v0.1, config.json.
    public["mixtral-8x7b"] = replace(
        public["llama2-7b"],
        name="mixtral-8x7b",
        context=32768,
        kv_heads=8,
        inner=14336,
        experts=8,
        experts_per_token=2,
        trains=None,
    )
    return own | public


NAMED: dict[str, Transformer] = _named()
"""The models that `--model` takes by name."""


def in_settings(model: Transformer) -> dict[str, Any] | None:
    """The model in the trainer's section `[model]`; None if the trainer lacks it."""
    if model.trains is None:
        return None
    family, size = model.trains
    settings: dict[str, Any] = {"family": family, "size": size}
    if model.context != SIZES[family][size]["context"]:
        settings["context"] = model.context
    return settings
