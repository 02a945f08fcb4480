"""What the early exit of an accelerator does on two streams is in order, alone and with the head divided among ranks. The streams are
pretended."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("sglang")

import torch  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

from sglang_patches.early_exit import graph_tap  # noqa: E402
from sglang_patches.early_exit.file import Adapter  # noqa: E402
from sglang_patches.early_exit.tap import HostTap  # noqa: E402
from tests.unit.accelerator.races import OrderedStreams, Races  # noqa: E402
from tests.unit.early_exit import test_tap  # noqa: E402
from tests.unit.early_exit.test_tap import EXIT, HIDDEN, LAYERS, VOCABULARY, draws, states  # noqa: E402

ROWS, STEPS = 4, 3


class InPlace(test_tap.Layer):
    """As SGLang's layers, which write over the residual stream that they are given."""

    def forward(self, positions, hidden_states, forward_batch, capture_output=None):
        if capture_output is not None:
            capture_output(hidden_states)
        return hidden_states.add_(hidden_states @ self.weight)


class Group:
    """Of two ranks, of which this one has the first half of the head. Its collectives are the target's."""

    world_size = 2

    def __init__(self, streams, model):
        self._streams, self._model, self.gathered = streams, model, []

    def all_gather(self, logits):
        assert self._streams.current is self._streams.forward, "no order with the target's own collectives"
        self.gathered.append(self._model.done)
        return torch.cat([logits, self._model.other_half], -1)


class Model(test_tap.Model):
    """done: layers of the forward that are launched."""

    def __init__(self, divided):
        super().__init__()
        self.model.layers = torch.nn.ModuleList([InPlace() for _ in range(LAYERS)])
        self.done = 0
        if divided:
            whole = self.lm_head.weight
            half = len(whole) // 2
            self._rest, self.lm_head = whole[half:], torch.nn.Linear(HIDDEN, half, bias=False)
            self.lm_head.weight = torch.nn.Parameter(whole[:half].detach())
            self.logits_processor = SimpleNamespace(_compute_lm_head=self._part)

    def _part(self, states, head):
        self.other_half = states @ self._rest.T
        return head(states)

    @torch.no_grad()
    def forward(self, states, mode=test_tap.ForwardMode.TARGET_VERIFY):
        for self.done in range(LAYERS):
            layer = self.model.layers[self.done]
            states = layer(None, states, SimpleNamespace(forward_mode=mode))
        return states


@pytest.fixture
def streams(monkeypatch):
    made, zeros = OrderedStreams(), torch.zeros
    monkeypatch.setattr(graph_tap.torch, "get_device_module", lambda device: made)
    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory=False, **how: zeros(*shape, **how))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    return made


@pytest.fixture(params=[False, True], ids=["alone", "divided"])
def made(request, streams):
    """A runner and its tap, whose steps the test takes itself."""
    model = Model(request.param)
    group = Group(streams, model) if request.param else SimpleNamespace(world_size=1)
    runner = SimpleNamespace(model=model, model_config=SimpleNamespace(vocab_size=VOCABULARY))
    runner.device, runner.dtype, runner.group = "cpu", torch.float32, group
    torch.manual_seed(2)
    with (
        get_parallel().override(tp_group=group, tp_rank=0),
        mock.patch.object(graph_tap.threading.Thread, "start"),
    ):
        runner.adapter = Adapter(HIDDEN)
        runner.tap = graph_tap.GraphTap(runner, runner.adapter, EXIT, rows=8, choices=4)
        yield runner


def step(runner, seed):
    """Returns what was told of it."""
    told = []
    runner.tap.expect(draws([0.7], [seed], ROWS), 4, lambda *answer: told.append(answer))
    runner.model(states(ROWS, seed))
    runner.tap._deliver(runner.tap._steps.get())
    return told


def run(runner, streams):
    with Races(streams) as races:
        for seed in range(STEPS):
            step(runner, seed)
    return races.found


def test_every_use_of_memory_is_in_order(made, streams):
    assert run(made, streams) == set()
    assert streams.clocks["side"]["side"] > STEPS * 5, "the side stream was busy"


def test_the_choices_are_those_of_the_whole_head(made, streams):
    whole = SimpleNamespace(model=Model(False), model_config=SimpleNamespace(vocab_size=VOCABULARY))
    whole.device, whole.dtype, said = "cpu", torch.float32, []
    with get_parallel().override(tp_group=SimpleNamespace(world_size=1), tp_rank=0):
        tap = HostTap(whole, made.adapter, EXIT)
        for seed in range(STEPS):
            tap.expect(draws([0.7], [seed], ROWS), 4, lambda *answer: said.append(answer))
            whole.model(states(ROWS, seed))
    for seed in range(STEPS):
        ((tokens, chances),) = step(made, seed)
        assert np.array_equal(tokens, said[seed][0]) and np.allclose(chances, said[seed][1], atol=1e-6)


def test_a_forward_that_fails_behind_the_exit_leaves_nothing_to_the_next(made, streams):
    ((expected, _),) = step(made, 5)
    with (
        mock.patch.object(Model, "forward", lambda self, states: fail(self, states)),
        pytest.raises(RuntimeError),
    ):
        made.model(states(ROWS, 9))
    ((tokens, _),) = step(made, 5)
    assert np.array_equal(tokens, expected)


def fail(model, states):
    """Up to the layer behind the exit."""
    for layer in model.model.layers[: EXIT + 1]:
        states = layer.forward(None, states, SimpleNamespace(forward_mode=test_tap.ForwardMode.TARGET_VERIFY))
    raise RuntimeError("no room")


@pytest.mark.parametrize("made", [True], indirect=True)
def test_the_ranks_gather_once_a_step_between_the_exit_and_the_end(made, streams):
    run(made, streams)
    assert len(made.group.gathered) == STEPS
    assert all(EXIT <= done < LAYERS for done in made.group.gathered)


@pytest.mark.parametrize(
    ("head", "after"),
    [(HIDDEN * HIDDEN, EXIT + 1), (HIDDEN * HIDDEN // 2, EXIT), (10**6, LAYERS - 1), (0, EXIT - 1)],
)
def test_the_main_stream_waits_for_the_head_after_the_layers_that_take_as_long(head, after):
    model = Model(False)
    model.lm_head = torch.nn.Embedding(head, 1)
    assert graph_tap._gathered_after(model, EXIT) == after


def without_a_copy(patch, made, streams):
    patch.setattr(torch.Tensor, "index_select", lambda self, dim, rows: self)
    return "add_ on forward beside"


def without_a_fork(patch, made, streams):
    patch.setattr(made.tap._stream, "wait_stream", lambda other: None)
    return "on side beside index_select on forward"


def without_a_join(patch, made, streams):
    """The next step's inputs are written while this one's are read."""
    patch.setattr(streams.forward, "wait_stream", lambda other: None)
    return "copy_ on forward beside"


def with_states_that_nobody_keeps(patch, made, streams):
    stock = made.tap._exit.logits

    def logits(states):
        found = stock(states)
        made.tap._kept[:] = [torch.empty(0)]
        return found

    patch.setattr(made.tap._exit, "logits", logits)
    return "given back on forward before"


@pytest.mark.parametrize(
    "broken", [without_a_copy, without_a_fork, without_a_join, with_states_that_nobody_keeps]
)
def test_a_broken_order_is_found(made, streams, monkeypatch, broken):
    expected = broken(monkeypatch, made, streams)
    assert any(expected in race for race in run(made, streams))


@pytest.mark.parametrize("at", range(4))
def test_a_step_that_is_written_over_while_it_is_read_is_not_told(made, streams, at):
    """The reader of one step comes between two of the next one's copies, of which there are four."""
    told = {1: [], 2: []}
    tap, copied = made.tap, []
    pinned = [tap._begun, tap._tokens, tap._chances, tap._done]

    def before(name, arguments):
        if name == "copy_" and tap._last == 2 and arguments[0].data_ptr() in {of.data_ptr() for of in pinned}:
            if len(copied) == at:
                tap._deliver(first)
            copied.append(name)

    for number in (1, 2):
        tap.expect(draws([1.0], [None], ROWS), 2, lambda *answer, number=number: told[number].append(answer))
        if number == 1:
            made.model(states(ROWS, 1))
            first = tap._steps.get()
            expected = tap._tokens[:ROWS, :2].clone().numpy()
    with Races(streams, before):
        made.model(states(ROWS, 9))
    assert len(copied) == 4
    assert len(told[1]) == (1 if at == 0 else 0)
    assert all(np.array_equal(tokens, expected) for tokens, _ in told[1])
    tap._deliver(tap._steps.get())
    assert len(told[2]) == 1
