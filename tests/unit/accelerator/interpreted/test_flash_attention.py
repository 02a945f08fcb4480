"""SGLang's FlashAttention backend (`fa3`): the keys its tables name for each row, and what it makes of the parts."""

import numpy as np
import pytest

from tests.unit.accelerator.interpreted.compiled import FlashAttention, stand_in_for_sgl_kernel

stand_in_for_sgl_kernel()

from sglang.srt.layers.attention import flashattention_backend  # noqa: E402

from tests.unit.accelerator.interpreted.server import Server, settings  # noqa: E402
from tests.unit.accelerator.trees import WIDTHS, forest, verification  # noqa: E402

WINDOW = 48


@pytest.fixture
def kernel(monkeypatch):
    kernel = FlashAttention()
    monkeypatch.setattr(flashattention_backend, "flash_attn_with_kvcache", kernel.with_kvcache)
    monkeypatch.setattr(flashattention_backend, "merge_state_v2", kernel.merge_state)
    return kernel


def serve(width, **server):
    return Server(verification(forest(width, seed=width), width), **server)


def attend(server, topk=2, planned=None, **options):
    with settings(planned or server.verification.width, topk):
        return server.attend(flashattention_backend.FlashAttentionBackend, **options)


def wrong_rows(kernel, server, columns=None):
    """(request, row) of every row that reads other slots than `columns` says, or one of them twice."""
    v = server.verification
    columns = columns or v.attended
    return {
        (request, row)
        for request in range(v.batch_size)
        for row in range(v.width)
        if sorted(kernel.reads[request * v.width + row])
        != sorted(server.slots(request)[columns(request, row)])
    }


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("width", [w for w in WIDTHS if w > 1])
def test_every_row_reads_its_path(kernel, width, graph, page_size):
    server = serve(width, page_size=page_size)
    np.testing.assert_allclose(*attend(server, graph=graph), atol=1e-4)
    assert not wrong_rows(kernel, server)


@pytest.mark.parametrize("graph", [False, True])
def test_in_a_sliding_window_too(kernel, graph):
    server = serve(17, window=WINDOW)

    def columns(*at):
        return server.verification.in_window(*at, WINDOW)

    np.testing.assert_allclose(*attend(server, graph=graph, columns=columns), atol=1e-4)
    assert not wrong_rows(kernel, server, columns)


def test_a_step_narrower_than_planned_does_not_work(kernel):
    """Also without graphs the tables have the width the server was started with."""
    with pytest.raises(IndexError):
        attend(serve(8), planned=33)


@pytest.mark.parametrize("graph", [False, True])
def test_one_wrong_bit_is_one_wrong_row(kernel, graph):
    server = serve(8)
    mask = server.verification.flipped(request=3, row=5, column=2)
    attend(server, graph=graph, mask=mask)
    assert wrong_rows(kernel, server) == {(3, 5)}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("width", [w for w in WIDTHS if w > 2])
def test_top_k_of_one_reads_a_chain_whatever_the_mask_says(kernel, width, graph):
    """Rows off the first path are wrong, which is why the plugin must not leave the top-k at one."""
    server = serve(width)
    v = server.verification
    attend(server, topk=1, graph=graph)
    assert not wrong_rows(kernel, server, lambda request, row: range(int(v.seq_lens[request]) + row + 1))
    assert wrong_rows(kernel, server) == v.off_first_path() != set()


def test_pages_and_a_sliding_window_together_are_refused():
    with pytest.raises(AssertionError, match="page size > 1 sliding window"):
        attend(serve(8, window=WINDOW, page_size=16))
