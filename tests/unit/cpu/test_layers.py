"""The fast norm and rotary embedding against the formula, row by row, and their hand-over to the stock path."""

from types import SimpleNamespace

import pytest
import torch

from sglang_patches.cpu import layers, packed_weights

DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 1e-2)])
ROWS = pytest.mark.parametrize("rows", [1, 3, layers.MAX_ROWS])


def _norm(width: int, dtype: torch.dtype, **overrides) -> SimpleNamespace:
    fields = {
        "weight": torch.randn(width).to(dtype),
        "hidden_size": width,
        "variance_epsilon": 1e-5,
        "variance_size_override": None,
        "override_orig_dtype": None,
        "cast_x_before_out_mul": False,
        "fp32_residual": False,
    }
    return SimpleNamespace(**{**fields, **overrides})


def _not_stock(*_):
    raise AssertionError("the stock path must not be taken here")


def _stock(*_):
    return "stock"


def _rms(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()


@DTYPES
@ROWS
@pytest.mark.parametrize("width", [1, 33, 576])
def test_norm_and_residual(dtype, tolerance, rows, width):
    norm = _norm(width, dtype)
    x, residual = (torch.randn(rows, width) * 3).to(dtype), torch.randn(rows, width).to(dtype)
    kept = x.clone()
    alone = layers.rms_norm(_not_stock, norm, x)
    torch.testing.assert_close(alone.float(), _rms(x.float(), norm.weight), atol=tolerance, rtol=tolerance)
    total = x.float() + residual.float()
    out, summed = layers.rms_norm(_not_stock, norm, x, residual)
    assert torch.equal(summed, total.to(dtype)) and torch.equal(x, kept)
    torch.testing.assert_close(out.float(), _rms(total, norm.weight), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_normalises_alike_alone_and_in_company(dtype):
    norm, x = _norm(576, dtype), torch.randn(16, 576).to(dtype)
    together = layers.rms_norm(_not_stock, norm, x)
    alone = torch.cat([layers.rms_norm(_not_stock, norm, row.unsqueeze(0)) for row in x])
    assert torch.equal(together, alone)


@pytest.mark.parametrize(
    ("norm", "x"),
    [
        (_norm(8, torch.float32), torch.ones(layers.MAX_ROWS + 1, 8)),
        (_norm(8, torch.float32), torch.ones(8, 2).t()),
        (_norm(8, torch.float16), torch.ones(2, 8, dtype=torch.float16)),
        (_norm(8, torch.float32, cast_x_before_out_mul=True), torch.ones(2, 8)),
        (_norm(8, torch.float32, variance_size_override=4), torch.ones(2, 8)),
        (_norm(4, torch.float32), torch.ones(2, 8)),
    ],
    ids=["many rows", "strided", "float16", "cast first", "partial variance", "wrong width"],
)
def test_other_norms_are_left_to_the_stock_path(norm, x):
    assert layers.rms_norm(_stock, norm, x) == "stock"


def _rope(neox: bool, rotary: int, dtype: torch.dtype) -> SimpleNamespace:
    angles = torch.outer(torch.arange(50.0), 10000 ** -(torch.arange(0, rotary, 2) / rotary))
    cache = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    return SimpleNamespace(cos_sin_cache=cache, head_size=16, rotary_dim=rotary, is_neox_style=neox)


def _rotated(rope, positions, x):
    """Rotate pair by pair as complex numbers."""
    half = rope.rotary_dim // 2
    cos, sin = rope.cos_sin_cache[positions].float().split(half, -1)
    heads = x.float().reshape(len(positions), -1, rope.head_size).clone()
    pairs = [(i, i + half) if rope.is_neox_style else (2 * i, 2 * i + 1) for i in range(half)]
    for i, (a, b) in enumerate(pairs):
        turned = torch.complex(heads[..., a], heads[..., b]) * torch.complex(cos[:, i], sin[:, i]).unsqueeze(
            1
        )
        heads[..., a], heads[..., b] = turned.real, turned.imag
    return heads.flatten(1)


@DTYPES
@ROWS
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary", [16, 8])
def test_rotary_embedding(dtype, tolerance, rows, neox, rotary):
    rope = _rope(neox, rotary, dtype)
    positions = torch.randint(0, 50, (rows,))
    qkv = torch.randn(rows, 16 * (4 + 2 + 2)).to(dtype)
    query, key, value = qkv.split([64, 32, 32], -1)
    wanted = [_rotated(rope, positions, x) for x in (query, key)]
    untouched = value.clone()
    got = layers.rope(_not_stock, rope, positions, query, key)
    for x, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(x.float(), want, atol=tolerance, rtol=tolerance)
    assert torch.equal(value, untouched)


def test_a_position_beyond_the_table_is_refused():
    query = torch.ones(1, 16)
    with pytest.raises(IndexError, match="positions"):
        layers.rope(_not_stock, _rope(True, 16, torch.float32), torch.tensor([50]), query, query.clone())


def test_offsets_are_left_to_the_stock_path():
    query = torch.ones(1, 16)
    rope = _rope(True, 16, torch.float32)
    assert layers.rope(_stock, rope, torch.tensor([1]), query, query, torch.tensor([1])) == "stock"


def multiplied(dtype: torch.dtype) -> None:
    if not packed_weights.can_pack(dtype):
        pytest.skip(f"this processor does not multiply {dtype}")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows", [1, 2, 7, 32, 128])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(rows, with_bias, dtype, tolerance):
    multiplied(dtype)
    layer = SimpleNamespace(weight=torch.randn(24, 40).to(dtype))
    x, bias = torch.randn(rows, 40).to(dtype), torch.randn(24).to(dtype) if with_bias else None
    kept = x.clone()
    out = layers.linear(_not_stock, None, layer, x, bias)
    want = torch.nn.functional.linear(
        x.double(), layer.weight.double(), None if bias is None else bias.double()
    )
    torch.testing.assert_close(out.double(), want, atol=tolerance * 10, rtol=tolerance)
    assert out.dtype == dtype and out.is_contiguous() and torch.equal(x, kept)


def test_updated_weights_are_packed_anew():
    layer, x = SimpleNamespace(weight=torch.ones(4, 8)), torch.ones(1, 8)
    assert layers.linear(_not_stock, None, layer, x).tolist() == [[8.0] * 4]
    layer.weight.data.fill_(2.0)  # as a weight loader writes
    packed_weights.forget_all()
    assert layers.linear(_not_stock, None, layer, x).tolist() == [[16.0] * 4]


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(129, 40),
        torch.ones(2, 40, dtype=torch.bfloat16),
        torch.ones(2, 40, dtype=torch.float64),
        torch.ones(1, 2, 40),
        torch.ones(0, 40),
    ],
)
def test_other_products_are_left_to_the_stock_path(x):
    assert layers.linear(_stock, None, SimpleNamespace(weight=torch.ones(24, 40)), x) == "stock"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(576, 1536), (3072, 576), (512, 8192)])
def test_a_row_of_a_product_is_the_same_in_any_company(dtype, outputs, inputs):
    """In bfloat16 up to rounding: some processors sum in another order when there are more rows."""
    multiplied(dtype)
    torch.manual_seed(0)
    layer, weight = SimpleNamespace(), (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    x = torch.randn(128, inputs).to(dtype)
    whole = packed_weights.multiply(x, layer, weight)
    rounding = 0.0 if dtype == torch.float32 else 2**-7
    for rows in (1, 2, 3, 7, 8, 16, 33, 64, 127):
        product = packed_weights.multiply(x[:rows].contiguous(), layer, weight)
        torch.testing.assert_close(product, whole[:rows], rtol=rounding, atol=rounding)


def test_bfloat16_in_software_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(packed_weights, "multiplies_bfloat16", lambda: False)
    packed_weights.can_pack.cache_clear()
    try:
        assert not packed_weights.can_pack(torch.bfloat16) and not packed_weights.can_pack(torch.bfloat16)
    finally:
        packed_weights.can_pack.cache_clear()
    assert ["--dtype float32" in record.message for record in caplog.records] == [True]
