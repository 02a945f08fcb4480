"""The cost curve of a model's linear layers, measured on real SGLang layers."""

import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from sglang.srt.layers.linear import ReplicatedLinear  # noqa: E402

from sglang_patches.start import row_cost  # noqa: E402
from sglang_patches.start.row_cost import measure_row_seconds  # noqa: E402

ROW_SECONDS, CALL_SECONDS = 0.25, 4.0  # of a layer; sums of them are exact


@pytest.fixture
def clock(monkeypatch):
    """Time passes only while layers work."""
    clock = SimpleNamespace(now=0.0)

    def timed(layer, x):
        clock.now += CALL_SECONDS + ROW_SECONDS * len(x)
        return layer.quant_method.apply(layer, x)

    monkeypatch.setattr(row_cost, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(row_cost, "_apply", timed)
    monkeypatch.setattr(row_cost, "BUDGET_SECONDS", math.inf)
    return clock


class _Model(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(ReplicatedLinear(512, 512, bias=False) for _ in range(layers))


@pytest.mark.parametrize("layers", [1, 12])
def test_every_layer_is_in_it_at_every_row_count(clock, layers):
    seconds = measure_row_seconds(_Model(layers), torch.float32, "cpu")
    for rows in (1, 2, 3, 100, 512, 1024):
        assert seconds(rows) == pytest.approx(layers * (CALL_SECONDS + ROW_SECONDS * rows))


@pytest.mark.parametrize(("seconds", "measured"), [(12.7, 1), (12.75, 2), (math.inf, len(row_cost.ROWS))])
def test_no_larger_row_count_is_timed_beyond_the_budget(clock, monkeypatch, seconds, measured):
    monkeypatch.setattr(row_cost, "BUDGET_SECONDS", seconds)
    measure_row_seconds(_Model(1), torch.float32, "cpu")
    taken = [row_cost.REPEATS * (CALL_SECONDS + ROW_SECONDS * rows) for rows in row_cost.ROWS]
    assert clock.now == sum(taken[:measured])


@pytest.mark.clock
def test_more_rows_of_real_layers_never_cost_less_and_many_cost_more():
    seconds = measure_row_seconds(_Model(4), torch.float32, "cpu")
    costs = [seconds(rows) for rows in (1, 2, 5, 8, 100, 512, 1024)]
    assert costs == sorted(costs)
    assert costs[0] > 0 and costs[-1] > 2 * costs[0]


def test_a_model_without_known_layers_promises_free_rows(clock):
    seconds = measure_row_seconds(torch.nn.Linear(8, 8), torch.float32, "cpu")
    assert seconds(512) == seconds(1) == 0.0
