"""The draft model over SGLang's FlashAttention backend (`fa3`), whole but for FlashAttention itself, which is replaced by its definition."""

import sys

import pytest

from tests.unit.accelerator.interpreted.compiled import FlashAttention, stand_in_for_sgl_kernel

stand_in_for_sgl_kernel()

from sglang.srt.layers.attention import flashattention_backend  # noqa: E402

from tests.unit.accelerator.interpreted.draft_walk import walk, with_a_wrong_slot  # noqa: E402
from tests.unit.accelerator.interpreted.server import plain_settings  # noqa: E402


@pytest.fixture
def kernel(monkeypatch):
    kernel = FlashAttention()
    monkeypatch.setattr(flashattention_backend, "flash_attn_with_kvcache", kernel.with_kvcache)
    monkeypatch.setattr(sys.modules["sgl_kernel.flash_attn"], "get_scheduler_metadata", kernel.divided_work)


@pytest.mark.parametrize("graphs", [False, True])
def test_every_row_attends_to_its_text_and_its_path(kernel, graphs, monkeypatch):
    with plain_settings():
        done = walk(flashattention_backend.FlashAttentionBackend, graphs, monkeypatch)
    assert done.wrong == []


def test_one_wrong_slot_is_one_wrong_row(kernel):
    with plain_settings():
        wrong, expected = with_a_wrong_slot(flashattention_backend.FlashAttentionBackend)
    assert wrong == expected
