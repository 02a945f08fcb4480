"""The cost curve of a model's linear layers, measured on real SGLang layers."""

import pytest
import torch

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from sglang.srt.layers.linear import ReplicatedLinear  # noqa: E402

from sglang_patches.workers.row_cost import measure_row_seconds  # noqa: E402


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
    few, many = (
        min(measure_row_seconds(_Model(layers), torch.float32, "cpu")(512) for _ in range(4))
        for layers in (1, 12)
    )
    assert many > 3 * few


def test_a_model_without_known_layers_promises_free_rows():
    seconds = measure_row_seconds(torch.nn.Linear(8, 8), torch.float32, "cpu")
    assert seconds(512) - seconds(1) < 1e-3
