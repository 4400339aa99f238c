"""Products of cut matrices: by either library, they are those of torch."""

import pytest
import torch

from mpitrain.torch_glue import products
from mpitrain.torch_glue.products import product, product_into, rows

LIBRARIES = [
    False,
    pytest.param(
        True,
        marks=pytest.mark.skipif(
            not products.has_onednn(), reason="needs a torch with oneDNN and its operator _linear_pointwise"
        ),
    ),
]


@pytest.mark.parametrize("takes_onednn", LIBRARIES)
@pytest.mark.parametrize("shape", [(2, 128, 256, 384), (256, 256, 384), (3, 5, 7), (1, 1, 1), (0, 8, 4), (2, 0, 4, 4)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_torch(
    shape: tuple[int, ...], has_bias: bool, takes_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_is_faster", lambda: takes_onednn)
    monkeypatch.setattr(products, "_LARGE", 1)
    generator = torch.Generator().manual_seed(0)
    a, weight = torch.randn(shape[:-1], generator=generator), torch.randn(shape[-1], shape[-2], generator=generator)
    bias = torch.randn(shape[-1], generator=generator) if has_bias else None
    expected = torch.nn.functional.linear(a.double(), weight.double(), None if bias is None else bias.double())
    # fp32 sums of up to 256 products of normal numbers: their rounding is far below this
    near = {"rtol": 1e-5, "atol": 1e-4}
    found = product(a, weight.t(), bias)
    torch.testing.assert_close(found.double(), expected, **near)
    assert found.is_contiguous() and not found._is_view()
    if bias is None:
        out = torch.full(expected.shape, torch.nan)
        product_into(out, a, weight.t())
        assert torch.equal(out, found)
        grad = found
        torch.testing.assert_close(
            product(grad, weight).double(), found.double() @ weight.double(), rtol=1e-5, atol=1e-2
        )
        of_weight = product(rows(grad).t(), rows(a))
        torch.testing.assert_close(
            of_weight.double(), rows(found).double().t() @ rows(a).double(), rtol=1e-5, atol=1e-2
        )


def test_small_and_short_products_are_torchs_own() -> None:
    large = torch.zeros(4096, 4096)
    assert products._takes_onednn(large, large) == products._is_faster()
    assert not products._takes_onednn(large[:8, :8], large[:8, :8])
    assert not products._takes_onednn(large.bfloat16(), large.bfloat16())
    assert not products._takes_onednn(large.double(), large.double())
    assert not products._takes_onednn(large.to("meta"), large.to("meta"))
