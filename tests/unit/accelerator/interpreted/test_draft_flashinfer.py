"""The draft model over SGLang's FlashInfer backend and FlashInfer's own planning; its kernels are replaced by their definitions."""

import contextlib

import pytest
import torch
from sglang.srt.layers.attention import flashinfer_backend

from tests.unit.accelerator.interpreted.draft_walk import walk, with_a_wrong_slot
from tests.unit.accelerator.interpreted.flashinfer_kernels import CudaOnCpu, stand_in
from tests.unit.accelerator.interpreted.server import plain_settings


@pytest.fixture
def compiled(monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


@pytest.mark.parametrize("graphs", [False, True])
def test_every_row_attends_to_its_text_and_its_path(compiled, graphs, monkeypatch):
    with plain_settings(), CudaOnCpu():
        done = walk(flashinfer_backend.FlashInferAttnBackend, graphs, monkeypatch)
    assert done.wrong == []


def test_one_wrong_slot_is_one_wrong_row(compiled):
    with plain_settings(), CudaOnCpu():
        wrong, expected = with_a_wrong_slot(flashinfer_backend.FlashInferAttnBackend)
    assert wrong == expected
