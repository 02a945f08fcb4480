"""The cost curve of a model's linear layers, measured on real SGLang layers."""

import numpy as np
import pytest
import torch

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from sglang.srt.layers.linear import ReplicatedLinear  # noqa: E402

from sglang_patches.workers import row_cost  # noqa: E402
from sglang_patches.workers.row_cost import measure_row_seconds  # noqa: E402


@pytest.fixture(autouse=True)
def all_row_counts_are_timed(monkeypatch):
    monkeypatch.setattr(row_cost, "BUDGET_SECONDS", 60.0)


class _Model(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(ReplicatedLinear(512, 512, bias=False) for _ in range(layers))


def test_more_rows_never_cost_less_and_many_cost_more():
    seconds = measure_row_seconds(_Model(4), torch.float32, "cpu")
    costs = [seconds(rows) for rows in (1, 2, 5, 8, 100, 512, 1024)]
    assert costs == sorted(costs)
    assert costs[0] > 0 and costs[-1] > 2 * costs[0]


def test_all_layers_are_in_it():
    models = [_Model(layers) for layers in (1, 12)]
    # In turn: whatever else the machine does slows both.
    seconds = [[measure_row_seconds(model, torch.float32, "cpu")(512) for model in models] for _ in range(4)]
    few, many = np.min(seconds, axis=0)
    assert many > 3 * few


def test_a_model_without_known_layers_promises_free_rows():
    seconds = measure_row_seconds(torch.nn.Linear(8, 8), torch.float32, "cpu")
    assert seconds(512) - seconds(1) < 1e-3
