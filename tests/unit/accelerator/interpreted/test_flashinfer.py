"""SGLang's FlashInfer backend: FlashInfer's own planning of our mask, read back by the rule of its kernel."""

import numpy as np
import pytest
from sglang.srt.layers.attention import flashinfer_backend

from tests.unit.accelerator.interpreted import flashinfer_kernels
from tests.unit.accelerator.interpreted.flashinfer_kernels import CudaOnCpu
from tests.unit.accelerator.interpreted.server import Server, settings
from tests.unit.accelerator.trees import WIDTHS, forest, verification


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    flashinfer_kernels.stand_in(monkeypatch)


def serve(width, **server):
    return Server(verification(forest(width, seed=width), width), **server)


def attend(server, planned=None, **options):
    with settings(planned or server.verification.width), CudaOnCpu():
        return server.attend(flashinfer_backend.FlashInferAttnBackend, **options)


def wrong_rows(out, expected):
    return set(zip(*np.nonzero(np.abs(out - expected).max(axis=(2, 3)) > 1e-4), strict=True))


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_row_attends_to_its_path(width, graph):
    assert not wrong_rows(*attend(serve(width), graph=graph))


def test_also_in_pages():
    assert not wrong_rows(*attend(serve(17, page_size=16)))


def test_a_step_may_be_narrower_than_planned():
    assert not wrong_rows(*attend(serve(8), planned=33))


@pytest.mark.parametrize("graph", [False, True])
def test_one_wrong_bit_is_one_wrong_row(graph):
    server = serve(8)
    mask = server.verification.flipped(request=3, row=5, column=2)
    assert wrong_rows(*attend(server, graph=graph, mask=mask)) == {(3, 5)}


def test_a_text_longer_than_the_sliding_window_spoils_itself_and_all_behind_it():
    """The mask is as long as the texts, the keys are as many as the window: the plugin must not verify so."""
    server = serve(8, window=48)
    v = server.verification
    wrong = wrong_rows(*attend(server, columns=lambda *at: v.in_window(*at, 48)))
    first_long = int(np.argmax(v.seq_lens > 48))
    assert {request for request, _ in wrong} == set(range(first_long, v.batch_size))
