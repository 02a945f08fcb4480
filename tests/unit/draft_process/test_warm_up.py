"""What a draft process runs before it says that it is ready."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang_patches.draft_process import model as process_model  # noqa: E402
from sglang_patches.draft_process import server  # noqa: E402
from tests.support.draft_side import saguaro_parts  # noqa: E402
from tests.unit.draft_process.test_model import Runner  # noqa: E402

ROWS = 4  # of the runner


class Watched(Runner):
    """runs: mode and prefix of each batch."""

    decode_cuda_graph_runner = prefill_cuda_graph_runner = None

    def __init__(self, context: int, slots: int) -> None:
        super().__init__(context, slots)
        self.runs = []

    def forward(self, batch):
        self.runs.append((batch.forward_mode.name, batch.extend_prefix_lens_cpu))
        return super().forward(batch)


def started(monkeypatch, context, slots):
    runner = Watched(context, slots)
    monkeypatch.setattr(process_model.host, "place_kv", lambda runner, batch: None)
    monkeypatch.setattr(server, "load_runner", lambda settings: runner)
    monkeypatch.setattr(server, "draft_parts", lambda settings: saguaro_parts())
    settings = SimpleNamespace(tokenizer="", rows=ROWS, vocabulary=5, serial=False, lookahead=4)
    return server.DraftServer(settings, None), runner


def test_prefills_of_one_and_two_texts_without_and_over_a_prefix_and_forwards(monkeypatch):
    """FlashInfer has other kernels for a prefill over a prefix, and fa3 other tables."""
    _, runner = started(monkeypatch, context=1000, slots=1000)
    beside = server.CHUNK - server.CATCH_UP - 1
    assert [run for run in runner.runs if run[0] == "EXTEND"] == [("EXTEND", [0, 0]), ("EXTEND", [beside])]
    assert ("DECODE", None) in runner.runs


@pytest.mark.parametrize("size", [{"context": 100, "slots": 1000}, {"context": 1000, "slots": 300}])
def test_a_model_that_takes_shorter_texts_alone_is_warmed_up_with_one(monkeypatch, size):
    _, runner = started(monkeypatch, **size)
    assert any(mode == "EXTEND" and prefixes[0] == 0 for mode, prefixes in runner.runs if prefixes)
    assert ("DECODE", None) in runner.runs


def test_nothing_is_left_of_it(monkeypatch):
    made, runner = started(monkeypatch, context=1000, slots=1000)
    assert made._side._model._sequences.room == 1000
