"""What cannot be cut is one clear error on all ranks, and leaves the model as it was."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import mpitrain
from collectives import Communicator
from mpitrain.models import GPT, GPTConfig
from mpitrain.models.llama import Llama
from mpitrain.models.sizes import LlamaConfig
from mpitrain.placement.parts import part_of
from mpitrain.tensor import Style

COLUMN, ROW = Style("column"), Style("row")


def gpt(heads: int = 2) -> GPT:
    return GPT(GPTConfig(vocab=50, context=8, width=12, layers=1, heads=heads, tied=False))


def changed(**styles: Style) -> dict[str, Style]:
    return {**{name.replace("__", "."): style for name, style in styles.items()}, **gpt().tensor_plan}


class Mixer(nn.Module):
    """Mixes tokens between two regions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), nn.Conv1d(4, 4, 3))]
        )


class Whole(nn.Module):
    """A block with an attention of linear layers, of which a plan cuts the MLP alone."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return self.out(nn.functional.scaled_dot_product_attention(q, k, v))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.mlp = Whole.Attention(), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.attn(x)
            return x + self.mlp(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Whole.Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def shared() -> nn.Module:
    model = Whole()
    model.blocks[1].mlp = model.blocks[0].mlp
    return model


MLPS = {"blocks.*.mlp.0": COLUMN, "blocks.*.mlp.1": ROW}


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def linears(inner: int, taken: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, inner), nn.Linear(taken, 4))


def ends() -> nn.Module:
    return nn.ModuleDict({"wte": nn.Embedding(8, 4), "head": nn.Linear(4, 8), "loss": nn.CrossEntropyLoss()})


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Style] | None, str]] = {
    "no plan": (lambda: nn.Linear(2, 2), None, "Linear brings no plan along"),
    "nothing of the name": (gpt, {"blocks.*.mlp.gate": COLUMN}, r"no module of the model matches 'blocks\.\*\.mlp\.gate'"),
    "heads": (
        lambda: gpt(3),
        changed(blocks__0__attn__qkv=Style("column", parts=3, blocks=3)),
        r"2 ranks cannot share the 3 blocks \(heads\) of blocks\.0\.attn\.qkv\.weight equally",
    ),
    "few heads": (lambda: gpt(1), None, r"2 ranks cannot share the 1 blocks \(heads\) of blocks\.0\.attn\.qkv\.weight equally"),
    "features": (gpt, changed(blocks__0__mlp__fc=Style("column", parts=5)), r"blocks\.0\.mlp\.fc\.weight has 48 output features"),
    "class": (gpt, changed(ln_f=COLUMN), r"cuts ln_f as 'column', which needs Linear; it is LayerNorm"),
    "loss": (gpt, {"loss": Style("loss")}, "needs one column layer outside of regions"),
    "no parameter": (gpt, changed(ln_f=Style("region")), r"ln_f \(region\) is a sum over ranks, but the plan cuts no parameter in it"),
    "forward": (lambda: nn.Sequential(nn.Linear(4, 4), Scaled(4, 4)), {"0": COLUMN, "1": ROW}, "the forward of its class Scaled is"),
    "computed weight": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)), {"0": COLUMN, "1": ROW},
        "cuts 0, whose weight is not a parameter but computed",
    ),
    "gathered by the head": (
        ends, {"head": Style("column", gathers=True), "loss": Style("loss")},
        r"loss \(loss\) takes this rank's part of the logits of head, but head gathers them",
    ),
    "gathered around the head": (
        lambda: nn.Sequential(ends(), nn.CrossEntropyLoss()), {"0.head": COLUMN, "0": Style("gather"), "1": Style("loss")},
        r"1 \(loss\) takes this rank's part of the logits of 0\.head, but 0 gathers them",
    ),
    "weights of classes": (
        lambda: nn.ModuleDict({"head": nn.Linear(4, 8), "loss": nn.CrossEntropyLoss(weight=torch.ones(8))}),
        {"head": COLUMN, "loss": Style("loss")}, r"and is one with weights; .* give head Style\('column', gathers=True\)",
    ),
    "loss of another class": (
        ends, {"head": COLUMN, "wte": Style("loss")}, r"wte \(loss\) must be an nn\.CrossEntropyLoss .* and is a Embedding;",
    ),
    "parts of a head": (
        ends, {"head": Style("column", parts=2), "loss": Style("loss")}, "head is gathered, .* got parts=2 and blocks=None",
    ),
    "parts of rows": (ends, {"wte": Style("vocabulary", parts=2)}, "wte is gathered, split or looked up in the order of the 2 ranks"),
    "shared rows": (
        lambda: linears(8, 8), {"0": Style("column", blocks=1, is_shared=True), "1": Style("row", blocks=1, is_shared=True)},
        r"2 ranks cannot share the 1 blocks \(heads\) of 1\.weight equally",
    ),
    "no other head": (ends, {"head": COLUMN, "loss": Style("loss", names=("wte",))}, "needs one column layer .* the plan has wte"),
    "matrices in a column": (
        lambda: linears(24, 8), {"0": COLUMN, "1": ROW},
        r"0 has 24 output features, more than 1 takes \(8\), .* pass Style\('column', parts=K\) .* or Style\('column', blocks=N\)",
    ),
    "matrices in a row": (
        lambda: linears(8, 16), {"0": COLUMN, "1": ROW},
        r"1 has 16 input features, more than each column layer of its region has \(8\), .* pass Style\('row', parts=K\)",
    ),
    "other parts": (
        lambda: linears(12, 12), {"0": Style("column", parts=2), "1": ROW},
        r"of 0 in another way .* of 1 .*: 2 x 6 features, whose parts begin at 0, 3 and 1 x 12 features, whose parts begin at 0, 6",
    ),
    "other blocks": (
        lambda: linears(12, 12), {"0": Style("column", blocks=3, is_even=False), "1": ROW},
        "1 x 12 features, whose parts begin at 0, 4 and 1 x 12 features, whose parts begin at 0, 6",
    ),
    "torch's attention": (
        lambda: nn.MultiheadAttention(8, 2), {"out_proj": ROW}, "cuts out_proj, but MultiheadAttention of torch computes",
    ),
    "a parameter of it": (
        lambda: nn.Sequential(nn.MultiheadAttention(8, 2)), {"0.in_proj_weight": Style("parameter", parts=3)},
        r"cuts 0\.in_proj_weight, but MultiheadAttention",
    ),
    "torch's encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2), {"linear1": COLUMN, "linear2": ROW}, "cuts linear1, but TransformerEncoderLayer",
    ),
    "torch's decoder": (
        lambda: nn.TransformerDecoderLayer(8, 2), {"linear1": COLUMN, "linear2": ROW}, "cuts linear1, but TransformerDecoderLayer",
    ),
    "torch's recurrence": (
        lambda: nn.Sequential(nn.LSTM(4, 4)), {"0.weight_ih_l0": Style("parameter"), "0": Style("region")},
        r"cuts 0\.weight_ih_l0, but LSTM",
    ),
    "attention": (Whole, MLPS, r"blocks\.0\.attn \(Attention\) .* may mix tokens; .* Style\('whole'\)"),
    "shared": (shared, MLPS | {"blocks.*.attn": Style("whole")}, r"blocks\.1\.mlp\.0 is a module that .* under another name"),
    "tokens": (Mixer, {"blocks.0.0.0": COLUMN, "blocks.0.0.1": ROW}, r"blocks\.0\.1 \(Conv1d\) .* may mix tokens"),
}  # fmt: skip


@pytest.mark.rest
@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit(comm: Communicator, case: str) -> None:
    make, plan, message = REFUSED[case]
    model = make()
    before = [(name, type(module), id(module)) for name, module in model.named_modules()]
    params = list(map(id, model.parameters()))
    with pytest.raises(ValueError, match=message):
        mpitrain.tensor_parallel(model, comm, plan)
    assert [(name, type(module), id(module)) for name, module in model.named_modules()] == before
    assert list(map(id, model.parameters())) == params
    assert all(part_of(param) is None for param in model.parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.ranks(2)
def test_an_attention_that_is_whole(comm: Communicator) -> None:
    torch.manual_seed(0)
    model, x = Whole(), torch.randn(2, 6, 4)
    expected = model(x)
    mpitrain.tensor_parallel(model, comm, MLPS | {"blocks.*.attn": Style("whole")})
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)


def test_a_joint_matrix_of_keys_and_values_as_long_as_the_queries(comm: Communicator) -> None:
    sizes = LlamaConfig(vocab=50, context=8, width=8 * comm.size, layers=1, heads=4 * comm.size, kv_heads=2 * comm.size)
    model, x = Llama(sizes), torch.zeros(1, 8, dtype=torch.long)
    for param in model.parameters():
        comm.broadcast(param.data)
    expected = model(x)
    mpitrain.tensor_parallel(model, comm, sequence=False)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
def test_twice(comm: Communicator) -> None:
    model = mpitrain.tensor_parallel(gpt(), comm)
    with pytest.raises(ValueError, match="the model is cut already"):
        mpitrain.tensor_parallel(model, comm)


@pytest.mark.ranks(2, 4)
def test_a_mesh_without_the_ranks_that_hold_the_parts(comm: Communicator) -> None:
    mesh = mpitrain.mesh(comm, tp=2)
    model = mpitrain.tensor_parallel(gpt(), mesh["tp"])
    with pytest.raises(ValueError, match=r"wte\.weight is cut over 2 ranks, which do not hold one copy"):
        mpitrain.fully_shard(model, mesh["dp_shard"])
    mpitrain.fully_shard(model, mesh)
    mesh.free()


class Residual(nn.Module):
    """Adds its input, or a parameter, to the sum over ranks."""

    def __init__(self, *, adds_parameter: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.shift = nn.Parameter(torch.ones(4)) if adds_parameter else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y + (x if self.shift is None else self.shift)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("adds_parameter", [False, True])
def test_what_goes_around_the_sum_of_a_region(comm: Communicator, adds_parameter: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Residual(adds_parameter=adds_parameter))
    mpitrain.tensor_parallel(model, comm, {"1.up": COLUMN, "1.down": ROW})
    what = r"a parameter of shape \(4,\)" if adds_parameter else "its input"
    with pytest.raises(ValueError, match=f"tensor_parallel: 1 uses {what} after its sum over ranks"):
        model(torch.ones(2, 4))


@pytest.mark.ranks(2)
def test_what_goes_around_the_sum_with_sequence_parallelism(comm: Communicator) -> None:
    """torch finds it first, because the sum has other tokens; the error says what a region is."""
    model = nn.Sequential(nn.ModuleList([Residual(adds_parameter=False)]))
    mpitrain.tensor_parallel(model, comm, {"0.0.up": COLUMN, "0.0.down": ROW})
    with pytest.raises(RuntimeError) as caught:
        model[0][0](torch.ones(2, 6, 4))
    assert "0.0 is a region of tensor_parallel" in caught.value.__notes__[0]


class Dropping(nn.Module):
    """A stack of blocks, of which a forward leaves some out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(3))

    def forward(self, x: torch.Tensor, dropped: int) -> torch.Tensor:
        for at, block in enumerate(self.blocks):
            x = x if at == dropped else block(x)
        return x


@pytest.mark.ranks(2)
def test_blocks_that_a_forward_leaves_out(comm: Communicator) -> None:
    """With sequence parallelism the first block splits the tokens, and the last block joins them."""
    torch.manual_seed(0)
    model, plan = Dropping(), {"blocks.*.0": COLUMN, "blocks.*.1": ROW}
    x = torch.randn(2, 6, 4)
    expected = model(x, 1)
    mpitrain.tensor_parallel(model, comm, plan)
    with pytest.raises(
        ValueError, match=r"splits the tokens before blocks\.0, but the model calls blocks\.1 without it"
    ):
        model(x, 0)
    with pytest.raises(ValueError, match=r"joins the tokens after blocks\.2, but the model calls blocks\.0 without it"):
        model(x, 2)
    torch.testing.assert_close(model(x, 1), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2)
def test_parameters_that_torch_replaces(comm: Communicator) -> None:
    with torch.device("meta"):
        model = gpt()
    mpitrain.tensor_parallel(model, comm).to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"wte\.weight was replaced after tensor_parallel, .* not to_empty"):
        model(torch.zeros(2, 8, dtype=torch.long))


@pytest.mark.ranks(2)
def test_ranks_with_other_inputs(comm: Communicator) -> None:
    model, x = mpitrain.tensor_parallel(gpt(), comm), torch.zeros(2, 8, dtype=torch.long)
    with pytest.raises(
        ValueError, match=r"the ranks differ: input 0 of shape \(2, 8\), .* input 0 of shape \(1, 8\),.* rank 1"
    ):
        model(x[comm.rank :])
    with pytest.raises(ValueError, match=r"must get the same inputs: .* input 1 of shape .* choose the batch"):
        model(x, x + comm.rank)
    assert model(x, x).isfinite()


class Spectrum(nn.Module):
    """From complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x.real + x.imag)))  # type: ignore[no-any-return]


@pytest.mark.ranks(2)
def test_inputs_that_are_conjugated_or_negated(comm: Communicator) -> None:
    """Their values are compared, not their memory, which torch conjugates or negates when it reads it."""
    torch.manual_seed(0)
    plain = Spectrum()
    model = mpitrain.tensor_parallel(copy.deepcopy(plain), comm, {"up": Style("column"), "down": Style("row")})
    x = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).conj()
    for given in (x, x.mT.contiguous().mT, x[:, :1].expand(3, 4), torch.view_as_real(x.resolve_conj())[..., 0] * 1j):
        torch.testing.assert_close(model(given), plain(given), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(x if comm.rank else x.resolve_conj()), plain(x), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="must get the same inputs"):
        model(x if comm.rank else x.conj())


@pytest.mark.ranks(2)
def test_ranks_with_other_models_or_plans(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=r"no module of the model matches 'h\.\*\.fc'"):
        mpitrain.tensor_parallel(gpt(), comm, {"h.*.fc": Style("column")} if comm.rank else None)
    plan = {"blocks.*.mlp.fc": Style("column"), "blocks.*.mlp.proj": Style("row")}
    with pytest.raises(
        ValueError, match=r"for blocks.0.mlp.fc on rank 0, Style\(kind='vocabulary', .* for wte on rank 1"
    ):
        mpitrain.tensor_parallel(
            gpt(), comm, plan | {"wte": Style("vocabulary")} if comm.rank else plan, sequence=False
        )
    with pytest.raises(ValueError, match=r"the ranks differ: sequence=True on rank 0, sequence=False on rank 1"):
        mpitrain.tensor_parallel(gpt(), comm, sequence=comm.rank == 0)


@pytest.mark.ranks(2)
def test_on_one_rank_nothing_is_cut(comm: Communicator) -> None:
    mesh = mpitrain.mesh(comm)
    model = gpt()
    assert mpitrain.tensor_parallel(model, mesh["tp"]) is model
    assert model(torch.zeros(1, 8, dtype=torch.long)).shape == (1, 8, 50)
    mesh.free()


@pytest.mark.ranks(2)
def test_second_derivatives(comm: Communicator) -> None:
    model = mpitrain.tensor_parallel(gpt(), comm)
    x = torch.zeros(1, 8, dtype=torch.long)
    loss = model(x, x)
    (grad,) = torch.autograd.grad(loss, model.get_parameter("blocks.0.mlp.fc.weight"), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


@pytest.mark.ranks(2)
def test_sharding_over_the_ranks_that_hold_the_parts(comm: Communicator) -> None:
    """They get the same data, so they cannot be data-parallel ranks, too."""
    for mesh in (None, comm, mpitrain.mesh(comm)):
        model = mpitrain.tensor_parallel(gpt(), comm)
        with pytest.raises(
            ValueError, match="or get different data there; pass the mesh whose axis tensor_parallel got"
        ):
            mpitrain.fully_shard(model, mesh)
    with pytest.raises(ValueError, match="the model is sharded already; call tensor_parallel before fully_shard"):
        mpitrain.tensor_parallel(mpitrain.fully_shard(gpt(), comm), comm)


@pytest.mark.ranks(2)
def test_tokens_and_targets_out_of_range(comm: Communicator) -> None:
    model, x = mpitrain.tensor_parallel(gpt(), comm), torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(IndexError, match="token 50 is out of range; expected 0 to 49"):
        model(x + 50)
    with pytest.raises(IndexError, match="target -1 is out of range; expected 0 to 49"):
        model(x, x - 1)


@pytest.mark.ranks(2)
def test_a_tied_parameter_needs_a_style_for_each_user(comm: Communicator) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.wte.weight

    with pytest.raises(ValueError, match=r"head\.weight is tied to a parameter that the plan cuts"):
        mpitrain.tensor_parallel(Tied(), comm, {"wte": Style("vocabulary")})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence", [False, True])
def test_a_write_in_place_behind_a_column_layer(comm: Communicator, sequence: bool) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList([nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))])
    x = torch.randn(2, 6, 4)
    expected = plain[0](x)
    plan = {"0.0": Style("column"), "0.2": Style("row")}
    cut = mpitrain.tensor_parallel(plain, comm, plan, sequence=sequence)
    torch.testing.assert_close(cut[0](x), expected, rtol=1e-5, atol=1e-6)


def test_styles_that_are_none() -> None:
    for wrong, message in (
        ({"kind": "colum"}, "unknown kind 'colum'; expected one of column, row"),
        ({"kind": "column", "blocks": 0}, "parts and blocks of at least 1, got 1 and 0"),
        ({"kind": "divide"}, "'divide' needs names"),
    ):
        with pytest.raises(ValueError, match=message):
            Style(**wrong)  # type: ignore[arg-type]
