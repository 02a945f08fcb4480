"""The draft model over SGLang's Triton attention backend, whole: its tables and kernels in Triton's interpreter."""

import pytest
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from tests.unit.accelerator.interpreted.draft_walk import walk, with_a_wrong_slot
from tests.unit.accelerator.interpreted.server import plain_settings


@pytest.mark.parametrize("graphs", [False, True])
def test_every_row_attends_to_its_text_and_its_path(graphs, monkeypatch):
    with plain_settings(triton_attention_num_kv_splits=2):  # the interpreter takes a while for each
        done = walk(TritonAttnBackend, graphs, monkeypatch)
    assert done.wrong == []


def test_one_wrong_slot_is_one_wrong_row():
    with plain_settings():
        wrong, expected = with_a_wrong_slot(TritonAttnBackend)
    assert wrong == expected
