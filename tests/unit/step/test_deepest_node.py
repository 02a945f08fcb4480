"""Close to the context limit trees are cut, so that no step begins beyond it."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from datastore_service.protocol.tree import DraftTree  # noqa: E402
from sglang_patches.ledger.requests import Step
from sglang_patches.step.decode import DecodeWorker  # noqa: E402
from sglang_patches.verification.layout import lay_out  # noqa: E402

CONTEXT = 256
WIDTH = 64
CHAIN = DraftTree(
    np.arange(WIDTH - 1, dtype=np.int32),
    np.arange(-1, WIDTH - 2, dtype=np.int32),
    np.linspace(0.9, 0.1, WIDTH - 1, dtype=np.float32),
    np.ones(WIDTH - 1, np.uint8),
)


@pytest.fixture
def worker() -> DecodeWorker:
    """It always verifies all rows, and its datastore always drafts the longest chain."""
    worker = object.__new__(DecodeWorker)
    worker.last_position = CONTEXT - 1
    worker.sources = SimpleNamespace(propose=lambda batch, states, depths, wanted: [CHAIN] * len(states))
    worker.policy = SimpleNamespace(
        choose=lambda trees, tenants: np.full(len(trees), WIDTH), wants_draft=lambda batch: True
    )
    worker.followers = []
    state = SimpleNamespace(tenant="", within_wish=lambda tree: tree)
    worker.book = SimpleNamespace(read=lambda step: ([state] * len(step.reqs), []), settle=lambda states: [])
    worker.broadcast_from_first_rank = lambda array: array
    return worker


def test_no_step_begins_beyond_the_context(worker):
    lengths = list(range(CONTEXT - 2 * WIDTH, CONTEXT + 1))
    step = Step([object()] * len(lengths), lengths, [[]] * len(lengths))
    cached = np.array(lengths) - 1
    layout = lay_out(worker.draft_batch(None, step).packed, np.zeros(len(cached), np.int64), cached)
    deepest = layout.positions.reshape(-1, WIDTH).max(axis=1)
    assert deepest.max() == CONTEXT - 1, "padding too stays within the context"
    next_root = np.where(deepest > cached, deepest + 1, cached + 1)  # if all is accepted
    going_on = np.array(lengths) < CONTEXT
    assert (next_root[going_on] <= CONTEXT - 1).all()
    far = np.array(lengths) <= CONTEXT - WIDTH
    assert (deepest[far] == cached[far] + WIDTH - 1).all(), "farther away nothing is cut"
