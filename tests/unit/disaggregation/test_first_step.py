"""SGLang's own relay between steps, filled as a decode instance fills it when a prefilled request arrives."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.managers.overlap_utils import FutureMap  # noqa: E402

from sglang_patches.disaggregation.first_step import relay_of_prefilled  # noqa: E402

WIDTH = 4
ALGORITHM = SimpleNamespace(is_ngram=lambda: True, is_some=lambda: True)


def arrived(overlap: bool) -> SimpleNamespace:
    """Two requests of 7 and 3 prompt tokens in the request pool's rows 2 and 5."""
    return SimpleNamespace(
        seq_lens=torch.tensor([7, 3]), req_pool_indices=torch.tensor([2, 5]), enable_overlap=overlap
    )


def relay(overlap: bool):
    pool = SimpleNamespace(req_to_token=torch.zeros(8, 16, dtype=torch.int32))
    future_map = FutureMap(torch.device("cpu"), ALGORITHM, pool)
    return relay_of_prefilled(arrived(overlap), torch.tensor([11, 22]), WIDTH, future_map), future_map


@pytest.mark.parametrize("overlap", [True, False])
def test_each_request_brings_the_token_that_the_prefill_sampled(overlap):
    spec_info, _ = relay(overlap)
    assert spec_info.accept_tokens.view(2, WIDTH).tolist() == [[11, 0, 0, 0], [22, 0, 0, 0]]
    assert spec_info.accept_lens.tolist() == [1, 1]
    assert spec_info.new_seq_lens.tolist() == [7, 3]


def test_overlap_scheduling_finds_it_in_the_relay():
    spec_info, future_map = relay(overlap=True)
    assert spec_info.future_indices.tolist() == [2, 5]
    assert future_map.accept_tokens_buf[[2, 5], 0].tolist() == [11, 22]
    assert future_map.accept_lens_buf.tolist() == [0, 0, 1, 0, 0, 1, 0, 0]
    assert future_map.new_seq_lens_buf[[2, 5]].tolist() == [7, 3]


def test_without_overlap_the_relay_is_left_alone():
    spec_info, future_map = relay(overlap=False)
    assert spec_info.future_indices is None
    assert future_map.accept_tokens_buf is None
