"""Reading hidden states in the middle of a model of torch that is built as SGLang's are; the accelerator is pretended."""

import logging
from queue import SimpleQueue
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("sglang")

import torch  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

from sglang_patches.early_exit import graph_tap  # noqa: E402
from sglang_patches.early_exit.file import Adapter  # noqa: E402
from sglang_patches.early_exit.tap import Draws, HostTap, tapped_layer  # noqa: E402
from sglang_patches.verification.shared_noise import draw  # noqa: E402
from tests.unit.accelerator.streams import Streams  # noqa: E402
from tests.waiting import eventually  # noqa: E402

HIDDEN, VOCABULARY, LAYERS, EXIT = 16, 50, 4, 2


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 4)

    def forward(self, positions, hidden_states, forward_batch, capture_output=None):
        if capture_output is not None:
            capture_output(hidden_states)
        return hidden_states + hidden_states @ self.weight


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.lm_head = torch.nn.Linear(HIDDEN, VOCABULARY + 6, bias=False)  # padded, as SGLang's are
        self.logits_processor = SimpleNamespace(_compute_lm_head=lambda states, head: head(states))

    @torch.no_grad()
    def forward(self, states, mode=ForwardMode.TARGET_VERIFY, upto=LAYERS):
        for layer in self.model.layers[:upto]:
            states = layer(None, states, SimpleNamespace(forward_mode=mode))
        return states


@pytest.fixture(autouse=True)
def alone():
    with get_parallel().override(tp_group=SimpleNamespace(world_size=1), tp_rank=0):
        yield


def runner():
    config = SimpleNamespace(vocab_size=VOCABULARY)
    return SimpleNamespace(model=Model(), model_config=config, device="cpu", dtype=torch.float32)


def draws(temperatures, seeds, rows, read=None):
    requests, places = list(zip(temperatures, seeds, strict=True)), np.arange(rows, dtype=np.int64)
    return Draws.of_batch(requests, places, places if read is None else np.array(read, np.int64))


def states(rows, seed=1):
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


def test_what_the_adapter_and_the_head_make_of_the_state_is_told():
    made, adapter, found = runner(), Adapter(HIDDEN), SimpleQueue()
    before = Model()(states(6), upto=EXIT)
    expected = torch.softmax(made.model.lm_head(adapter(before))[:, :VOCABULARY], -1).topk(3)
    tap = HostTap(made, adapter, EXIT)
    tap.expect(draws([1.0, 1.0], [None, None], 6), 3, lambda *said: found.put(said))
    made.model(states(6))
    tokens, chances = found.get(timeout=1)
    assert tokens.dtype == np.int32 and tokens.tolist() == expected.indices.tolist()
    assert np.allclose(chances, expected.values.detach())


def test_of_the_rows_that_are_read_each_is_told_as_if_all_were():
    made, adapter, found = runner(), Adapter(HIDDEN), []
    tap, temperatures, seeds = HostTap(made, adapter, EXIT), [0.0, 0.7], [None, 99]
    for read in (None, [1, 3, 5]):
        tap.expect(draws(temperatures, seeds, 6, read), 4, lambda *said: found.append(said))
        made.model(states(6))
    (whole, whole_chances), (part, chances) = found
    assert np.array_equal(part, whole[[1, 3, 5]]) and np.allclose(chances, whole_chances[[1, 3, 5]])


def test_nothing_changes_and_a_forward_is_told_once():
    made, found = runner(), []
    before = made.model(states(5))
    tap = HostTap(made, Adapter(HIDDEN), EXIT)
    tap.expect(draws([1.0], [None], 5), 2, lambda *said: found.append(said))
    assert torch.equal(made.model(states(5), ForwardMode.EXTEND), before) and not found, "no verification"
    assert torch.equal(made.model(states(5)), before) and len(found) == 1
    assert torch.equal(made.model(states(5)), before) and len(found) == 1, "nobody asked"


def test_who_else_captures_still_does():
    made, seen = runner(), []
    HostTap(made, Adapter(HIDDEN), EXIT)
    batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY)
    made.model.model.layers[EXIT](
        None, states(2), batch, capture_output=lambda kept, owned=False: seen.append(kept)
    )
    assert len(seen) == 1


def test_it_draws_with_the_target_s_noise():
    """Two requests of three rows: one greedy, one that shares its noise."""
    made, adapter, found = runner(), Adapter(HIDDEN), []
    logits = made.model.lm_head(adapter(made.model(states(6), upto=EXIT)))[:, :VOCABULARY]
    tap = HostTap(made, adapter, EXIT)
    tap.expect(draws([0.0, 0.7], [None, 99], 6), 4, lambda *said: found.append(said))
    made.model(states(6))
    ((tokens, _),) = found
    assert tokens[:3, 0].tolist() == logits[:3].argmax(-1).tolist()
    drawn = draw(torch.softmax(logits[3:].detach() / 0.7, -1), torch.full((3,), 99), torch.arange(4, 7))
    assert tokens[3:, 0].tolist() == drawn.tolist()


@pytest.mark.parametrize("broken", ["no layers", "no capture", "no head", "too deep", "no depth"])
def test_a_model_without_a_place_for_it_is_refused_by_name(broken):
    model, layer = Model(), {"too deep": LAYERS, "no depth": 0}.get(broken, EXIT)
    if broken == "no layers":
        del model.model
    elif broken == "no head":
        del model.lm_head
    elif broken == "no capture":
        model.model.layers[EXIT].forward = lambda positions, hidden_states, forward_batch: hidden_states
    with pytest.raises(ValueError, match="Model: its layers do not hand out"):
        tapped_layer(model, layer)


@pytest.fixture
def streams(monkeypatch):
    """There is no device to pin memory for, and no stream to wait for."""
    made, zeros = Streams(), torch.zeros
    monkeypatch.setattr(graph_tap.torch, "get_device_module", lambda device: made)
    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory=False, **how: zeros(*shape, **how))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(graph_tap, "LATE_SECONDS", 60.0)
    return made


def test_on_an_accelerator_the_choices_come_from_another_thread(streams):
    made, adapter, found = runner(), Adapter(HIDDEN), SimpleQueue()
    tap, host = graph_tap.GraphTap(made, adapter, EXIT, rows=32, choices=8), runner()
    said = []
    host_tap = HostTap(host, adapter, EXIT)
    for seed, rows, read in ((3, 6, [0, 2, 5]), (4, 4, None), (5, 8, [1, 7])):
        of = draws([0.7, 0.0], [seed, None], rows, read)
        tap.expect(of, 4, lambda *answer: found.put(answer))
        host_tap.expect(of, 4, lambda *answer: said.append(answer))
        made.model(states(rows, seed)), host.model(states(rows, seed))
        tokens, chances = found.get(timeout=60)
        assert np.array_equal(tokens, said[-1][0]) and np.allclose(chances, said[-1][1])
    assert streams.log.count("side waits for forward") == streams.log.count("forward waits for side") == 3


def test_what_a_later_step_has_written_over_is_not_told(streams):
    made, found = runner(), SimpleQueue()
    with mock.patch.object(graph_tap.threading.Thread, "start"):  # this test takes the steps itself
        tap = graph_tap.GraphTap(made, Adapter(HIDDEN), EXIT, rows=32, choices=8)
    for number in (1, 2):
        tap.expect(draws([1.0], [None], 4), 2, lambda *answer, number=number: found.put(number))
        made.model(states(4))
    for _ in (1, 2):
        tap._deliver(tap._steps.get())
    assert found.get(timeout=1) == 2 and found.empty()


def test_a_step_without_an_early_exit_is_given_up_and_the_log_says_so(streams, monkeypatch, caplog):
    monkeypatch.setattr(graph_tap, "LATE_SECONDS", 0.05)
    made, found = runner(), SimpleQueue()
    tap = graph_tap.GraphTap(made, Adapter(HIDDEN), EXIT, rows=32, choices=8)
    tap.expect(draws([1.0], [None], 4), 2, lambda *answer: found.put(1))
    eventually(lambda: "did not speak" in caplog.text, seconds=60)
    monkeypatch.setattr(graph_tap, "LATE_SECONDS", 60.0)
    tap.expect(draws([1.0], [None], 4), 2, lambda *answer: found.put(2))
    made.model(states(4))
    assert found.get(timeout=60) == 2 and found.empty()
    assert caplog.text.count("a step's early exit did not speak") == 1


def test_a_receiver_that_fails_stops_nothing_but_the_reading(streams, caplog):
    made = runner()
    tap = graph_tap.GraphTap(made, Adapter(HIDDEN), EXIT, rows=32, choices=8)
    before = made.model(states(4))
    with caplog.at_level(logging.ERROR):
        tap.expect(draws([1.0], [None], 4), 2, lambda *answer: 1 / 0)
        made.model(states(4))
        tap._thread.join(timeout=60)
    assert "the early exit is no longer read" in caplog.text
    tap.expect(draws([1.0], [None], 4), 2, lambda *answer: None)
    assert torch.equal(made.model(states(4)), before)
