"""The start is refused where the widest verification would not fit."""

import logging

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang_patches.start.room import check_verification_memory, logits_bytes  # noqa: E402

VOCABULARY = 151_936


def test_logits_of_a_wide_step():
    """48 requests of a model with a large vocabulary, 16 rows each."""
    assert logits_bytes(48 * 16, VOCABULARY, torch.bfloat16) == 768 * 151_936 * 6
    assert logits_bytes(1, VOCABULARY, torch.float32) == 151_936 * 8


def test_what_fits_is_said(caplog):
    with caplog.at_level(logging.INFO):
        check_verification_memory(100, 50_000, torch.float32, "cpu", 0)
    assert "a step with 100 rows take 0.04 GiB" in caplog.text


def test_what_does_not_fit_is_refused():
    with pytest.raises(
        RuntimeError, match=r"take 11320\.11 GiB.*--max-running-requests or --specstore-nodes"
    ):
        check_verification_memory(10_000_000, VOCABULARY, torch.float32, "cpu", 0)
