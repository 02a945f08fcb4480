"""SGLang's Triton attention backend, whole: its tables and kernels over our masks, against dense attention."""

import numpy as np
import pytest
import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from tests.unit.accelerator.interpreted.server import Server, algorithm, dense_attention, settings
from tests.unit.accelerator.trees import WIDTHS, forest, verification

WINDOW = 48


def serve(width, **server):
    return Server(verification(forest(width, seed=width), width), **server)


def attend(server, planned=None, **options):
    """planned: rows a request that the server was started for, as many as are verified by default."""
    with settings(planned or server.verification.width):
        return server.attend(TritonAttnBackend, **options)


def wrong_rows(out, expected):
    """(request, row) of every row that deviates."""
    return set(zip(*np.nonzero(np.abs(out - expected).max(axis=(2, 3)) > 1e-4), strict=True))


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_row_attends_to_its_path(width, graph):
    assert not wrong_rows(*attend(serve(width), graph=graph))


@pytest.mark.parametrize("server", [{"page_size": 16}, {"mla": True}])
def test_also_in_pages_and_over_latent_keys(server):
    assert not wrong_rows(*attend(serve(17, **server)))


def test_a_step_may_be_narrower_than_planned():
    assert not wrong_rows(*attend(serve(8), planned=33))


@pytest.mark.parametrize("graph", [False, True])
def test_one_wrong_bit_is_one_wrong_row(graph):
    server = serve(8)
    mask = server.verification.flipped(request=3, row=5, column=2)
    assert wrong_rows(*attend(server, graph=graph, mask=mask)) == {(3, 5)}


@pytest.mark.parametrize("graph", [False, True])
def test_a_sliding_window_is_right_along_the_first_path_alone(graph):
    """The kernel takes a row's number for its position: rows further down than their depth miss the oldest keys of
    their window once the text is longer than it. When this fails, SGLang counts positions and docs/accelerators.md
    is out of date."""
    server = serve(17, window=WINDOW)
    v = server.verification
    out, by_position = attend(server, graph=graph, columns=lambda *at: v.in_window(*at, WINDOW))
    wrong = wrong_rows(out, by_position)
    assert wrong and all(row > len(v.path(request, row)) - 1 for request, row in wrong)
    server = serve(17, window=WINDOW)
    assert not wrong_rows(*attend(server, graph=graph, columns=lambda *at: v.in_window_of_rows(*at, WINDOW)))


def test_with_a_sliding_window_plain_decoding_sees_one_key_less_than_verification():
    """Also at width 1: SGLang's decode takes the window's last keys with its own among them, verification beside them."""
    server = serve(1, window=WINDOW)
    v = server.verification
    assert not wrong_rows(*attend(server, columns=lambda *at: v.in_window(*at, WINDOW)))
    with settings(1):
        backend, layer = TritonAttnBackend(server.model_runner(algorithm())), server.layer()
        batch = plain_step(server)
        backend.init_forward_metadata(batch)
        q, k, value = server.queries(v.batch_size)
        out = backend.forward_decode(q, k, value, layer, batch)
    for window, same in ((WINDOW, False), (WINDOW - 1, True)):
        expected = dense_attention(server, layer, q, lambda *at, w=window: v.in_window(*at, w))
        assert (not wrong_rows(out.view(expected.shape).numpy(), expected)) is same


def plain_step(server):
    v = server.verification
    lengths = torch.from_numpy(v.seq_lens) + 1
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=v.batch_size,
        input_ids=torch.from_numpy(v.layout.tokens),
        req_pool_indices=server.rows,
        seq_lens=lengths,
        out_cache_loc=server.write_slots(),
        seq_lens_sum=int(lengths.sum()),
        seq_lens_cpu=lengths.clone(),
        positions=lengths - 1,
    )
    server.translator.bind_own_plan(batch)
    return batch
