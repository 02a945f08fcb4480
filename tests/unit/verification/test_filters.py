"""Top-k, top-p and min-p in the order of the token ids, against SGLang's own and against what FlashInfer's kernels keep."""

import numpy as np
import pytest
import torch
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_patches.verification import filters
from sglang_patches.verification.filters import keep_filtered
from tests.unit.verification.plain_decoding import filtered

ROWS = 60


@pytest.fixture(params=["host", "device"])
def where(request, monkeypatch):
    """Both implementations; the one for devices runs here on the CPU."""
    if request.param == "device":
        on_device = filters._keep_on_device
        monkeypatch.setattr(filters, "_keep_on_host", lambda *rows: on_device(*rows, rows[0].shape[1]))
    return request.param


def random_rows(vocab, scale, seed=0):
    """Probabilities and a filter of each kind for every row, some of which ask for nothing."""
    draw = torch.Generator().manual_seed(seed)
    probabilities = torch.softmax(torch.randn(ROWS, vocab, generator=draw) * scale, dim=-1)
    top_ks = torch.randint(1, vocab + 20, (ROWS,), generator=draw, dtype=torch.int32)
    top_ps, min_ps = 0.99 * torch.rand(2, ROWS, generator=draw) + 0.01
    top_ks[::3], top_ps[::4], min_ps[::5] = TOP_K_ALL, 1.0, 0.0
    return probabilities, top_ks, top_ps, min_ps * 0.3


@pytest.mark.parametrize("scale", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("vocab", [24, 3000])
def test_keeps_what_sglang_keeps(where, vocab, scale):
    rows = random_rows(vocab, scale)
    # Where a sum rounds to more than 1, SGLang's top-p of 1 cuts a tail of some 1e-7.
    rows[2][:] = torch.where(rows[2] == 1.0, 1.0 + 1e-5, rows[2])
    kept, expected = keep_filtered(*rows), filtered(*rows).float()
    assert torch.equal(kept > 0, expected > 0)
    torch.testing.assert_close(kept, expected)
    assert 1 < (kept > 0).sum(dim=-1).float().mean() < vocab / 2


@pytest.mark.parametrize("only", range(3))
def test_a_filter_that_nobody_asks_for_need_not_be_given(where, only):
    probabilities, *asked = random_rows(50, 2.0)
    nothing = torch.full((ROWS,), TOP_K_ALL), torch.ones(ROWS), torch.zeros(ROWS)
    one = [values if i == only else None for i, values in enumerate(asked)]
    full = [values if i == only else nothing[i] for i, values in enumerate(asked)]
    torch.testing.assert_close(keep_filtered(probabilities, *one), keep_filtered(probabilities, *full))
    assert keep_filtered(probabilities, None, None, None) is probabilities


def test_a_sum_that_rounds_to_more_than_one_cuts_nothing(where):
    probabilities = torch.softmax(6 * torch.randn(200, 5000, generator=torch.Generator().manual_seed(1)), -1)
    assert (probabilities.cumsum(dim=-1)[:, -1] > 1).any()
    top_ps = torch.ones(200)
    top_ps[0] = 0.5
    kept = keep_filtered(probabilities, None, top_ps, None)
    assert torch.equal(kept[1:] > 0, probabilities[1:] > 0)


def tied_rows():
    """Probabilities of few values."""
    probabilities, *asked = random_rows(40, 1.0, seed=3)
    coarse = (probabilities * 64).ceil() / 64
    coarse /= coarse.sum(dim=-1, keepdim=True)
    assert all(len(row.unique()) < 12 for row in coarse)
    return coarse, *asked


def test_of_tokens_that_tie_at_the_last_place_the_first_stay(where):
    rows = tied_rows()
    kept = keep_filtered(*rows)
    assert torch.equal((kept > 0).sum(dim=-1), (filtered(*rows).float() > 0).sum(dim=-1))
    cut = 0
    for row, of_row in zip(rows[0], kept, strict=True):
        order = row.sort(descending=True, stable=True).indices
        count = int((of_row > 0).sum())
        assert (of_row[order[:count]] > 0).all()
        cut += bool(row[order[count - 1]] == row[order[min(count, len(row) - 1)]]) and count < len(row)
    assert cut > 10  # places where ties were cut


def kernels_keep(p, top_k, top_p, min_p):
    """bool [vocab]. FlashInfer's joint sampler accepts a token if fewer than k are likelier and those have less mass than p; with
    min-p SGLang first renormalises by top-k, then by top-p."""
    p = p.astype(np.float64)
    likelier = p[None] > p[:, None]  # [token, other]
    few = likelier.sum(axis=1) < top_k
    mass = p[few].sum() if min_p > 0 else 1.0
    return few & (likelier @ p < top_p * mass) & (p >= np.float32(p.max()) * np.float32(min_p))


@pytest.mark.parametrize("rows", [random_rows(40, 2.0), tied_rows()], ids=["distinct", "tied"])
def test_keeps_what_flashinfers_kernels_keep(where, rows):
    kept = keep_filtered(*rows, flashinfer=True)
    expected = np.array([kernels_keep(*(x.numpy() for x in row)) for row in zip(*rows, strict=True)])
    np.testing.assert_array_equal((kept > 0).numpy(), expected)
    torch.testing.assert_close(kept, torch.nn.functional.normalize(rows[0] * expected, p=1.0))
    assert not torch.equal(kept > 0, keep_filtered(*rows) > 0)


@pytest.mark.parametrize(("flashinfer", "counts"), [(False, [2, 3, 4]), (True, [1, 2, 4])])
def test_a_mass_of_exactly_top_p(where, flashinfer, counts):
    """SGLang keeps one more token then, and FlashInfer's kernels do not."""
    probabilities, top_ps = torch.tensor([[0.125, 0.5, 0.25, 0.125]] * 3), torch.tensor([0.5, 0.75, 0.875])
    rows = probabilities, torch.full((3,), TOP_K_ALL), top_ps, torch.full((3,), 0.01)
    kept = keep_filtered(*rows, flashinfer=flashinfer) > 0
    if flashinfer:
        expected = [kernels_keep(*(x.numpy() for x in row)).tolist() for row in zip(*rows, strict=True)]
    else:
        expected = (filtered(*rows) > 0).tolist()
    assert kept.tolist() == expected and kept.sum(dim=-1).tolist() == counts


@pytest.mark.parametrize("flashinfer", [False, True])
def test_a_device_needs_to_rank_no_more_tokens_than_the_largest_top_k(flashinfer):
    probabilities, top_ks, top_ps, _ = tied_rows()
    rows = probabilities, top_ks.clamp(max=10), top_ps, torch.zeros(ROWS), flashinfer
    torch.testing.assert_close(filters._keep_on_device(*rows, 10), filters._keep_on_device(*rows, 40))


@pytest.mark.parametrize("flashinfer", [False, True])
def test_a_row_of_no_numbers_ends(flashinfer):
    probabilities, *asked = random_rows(40, 1.0, seed=3)
    probabilities[0] = torch.nan
    kept = keep_filtered(probabilities, *asked, flashinfer=flashinfer)
    assert kept[0].isnan().all() and not kept[1:].isnan().any()
