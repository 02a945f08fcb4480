"""SGLang's FlashInfer backend: FlashInfer's own planning of our mask, read back by the rule of its kernel."""

from types import SimpleNamespace

import flashinfer.prefill
import numpy as np
import pytest
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from sglang.srt.layers.attention import flashinfer_backend
from torch.overrides import TorchFunctionMode

from tests.unit.accelerator.interpreted.compiled import packbits_little, softmax_over
from tests.unit.accelerator.interpreted.server import Server, settings
from tests.unit.accelerator.trees import WIDTHS, forest, verification


class Prefill(BatchPrefillWithPagedKVCacheWrapper):
    """FlashInfer's wrapper without its workspaces and compiled module: `plan` is its own, `forward` follows
    `DefaultAttention` in its attention/variants.cuh (a custom mask's bit q * kv_len + kv, little-endian)."""

    def __init__(self, workspace, layout, *, backend, use_cuda_graph=False, **buffers):
        assert layout == "NHD"
        self._backend, self._use_cuda_graph = backend, use_cuda_graph
        self._jit_module = SimpleNamespace(plan=lambda *arguments: arguments)
        self._float_workspace_buffer = self._int_workspace_buffer = torch.empty(64, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.empty(0)
        self._kv_lens_buffer = torch.empty(64, dtype=torch.int32)
        self._max_total_num_rows, self._variant_owns_mask, self.device = None, False, torch.device("cpu")
        self._custom_mask_buf = self._mask_indptr_buf = None
        for name, buffer in buffers.items():
            setattr(self, f"_{name}", buffer)
        self._fixed_batch_size = len(buffers["qo_indptr_buf"]) - 1 if use_cuda_graph else 0

    def forward(self, q, kv_cache, *, causal, sm_scale, window_left, **_):
        out = torch.full_like(q, torch.nan)
        self.reads = {}
        for sequence in range(self._batch_size):
            first, last = self._qo_indptr_buf[sequence : sequence + 2].tolist()
            begin, end = self._paged_kv_indptr_buf[sequence : sequence + 2].tolist()
            slots = self._paged_kv_indices_buf[begin:end].long()
            bits = self._custom_mask_buf[self._mask_indptr_buf[sequence] :].numpy()
            for row in range(first, last):
                offsets = (row - first) * len(slots) + np.arange(len(slots))
                visible = (bits[offsets // 8] >> (offsets % 8) & 1).astype(bool)
                seen = slots[torch.from_numpy(visible)]
                self.reads[row] = seen.tolist()
                out[row], _ = softmax_over(q[row], kv_cache[0][seen], kv_cache[1][seen], sm_scale)
        return out


class CudaOnCpu(TorchFunctionMode):
    """What SGLang allocates on "cuda" by name."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda":
            kwargs = kwargs | {"device": "cpu"}
        return function(*args, **kwargs)


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    monkeypatch.setattr(flashinfer.prefill, "segment_packbits", packbits_little)
    for name, value in {
        "BatchPrefillWithPagedKVCacheWrapper": Prefill,
        "BatchPrefillWithRaggedKVCacheWrapper": lambda *_, **__: None,
        "BatchDecodeWithPagedKVCacheWrapper": lambda *_, **__: None,
    }.items():
        monkeypatch.setattr(flashinfer_backend, name, value, raising=False)


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
