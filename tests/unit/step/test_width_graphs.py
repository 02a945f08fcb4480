"""Graphs of several widths, with a graph runner that records instead of capturing: nobody here has the hardware."""

import pytest

pytest.importorskip("sglang")

from sglang.srt.mem_cache.allocation_sizing import get_alloc_len_per_decode  # noqa: E402
from sglang.srt.runtime_context import (  # noqa: E402
    SpawnRanks,
    get_exec,
    get_spec,
    publish,
    reset_context,
)

from sglang_patches.options import Options  # noqa: E402
from sglang_patches.step.length import LengthPolicy  # noqa: E402
from sglang_patches.step.widths import (  # noqa: E402
    MOST_ROWS,
    WidthGraphs,
    batch_sizes,
    captures_decode_graphs,
    possible_widths,  # noqa: E402
)
from tests.unit.plugin.resolution import server_args  # noqa: E402

NODES = 15


class FakeAttention:
    def __init__(self):
        self.width = get_spec().speculative_num_draft_tokens


class FakeGraphs:
    """Stands in for DecodeCudaGraphRunner: same constructor, no capture."""

    def __init__(self, runner, *, attn_backend, speculative_num_steps, speculative_num_draft_tokens):
        assert speculative_num_steps * get_spec().speculative_eagle_topk <= max(
            2, speculative_num_draft_tokens
        )
        self.attention, self.width = attn_backend, speculative_num_draft_tokens
        self.batch_sizes = list(get_exec().graph.cuda_graph_config.decode.bs)


class FakeRunner:
    device, gpu_id = "cpu", 0

    def __init__(self):
        self.attn_backend = FakeAttention()
        self.decode_cuda_graph_runner = FakeGraphs(
            self,
            attn_backend=self.attn_backend,
            speculative_num_steps=get_spec().speculative_num_steps,
            speculative_num_draft_tokens=self.attn_backend.width,
        )

    def _get_attention_backend(self, init_new_workspace):
        assert not init_new_workspace
        return FakeAttention()

    def _decode_cuda_graph_runner_cls(self):
        return FakeGraphs

    def pair(self):
        return self.attn_backend, self.decode_cuda_graph_runner


@pytest.fixture
def published(plugin, model_path, monkeypatch):
    """Publishes the resolved configuration of a server on a Hopper card, as its scheduler does."""
    monkeypatch.setenv("SPECSTORE_NODES", str(NODES))

    def publish_with(**given):
        arguments = server_args(model_path("dense"), "hopper", **given)
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))

    yield publish_with
    reset_context()


@pytest.fixture
def graphs(published):
    published()
    graphs = WidthGraphs(FakeRunner(), NODES + 1)
    graphs.capture()
    return graphs


def test_each_step_runs_the_graph_and_the_backend_of_its_width(graphs):
    runner = graphs._runner
    own = runner.pair()
    assert graphs.widths == (1, 4, 8, 16)
    for width in (1, 16, 4, 8, 4):
        with graphs.of_width(width):
            attention, captured = runner.pair()
            assert (attention.width, captured.width, captured.attention) == (width, width, attention)
        assert runner.pair() == own


def test_runner_is_restored_when_a_step_fails(graphs):
    own = graphs._runner.pair()
    with pytest.raises(RuntimeError), graphs.of_width(4):
        raise RuntimeError("a kernel failed")
    assert graphs._runner.pair() == own


def test_configuration_and_allocation_stay_those_of_the_widest(published):
    published()
    config, room = get_exec().graph.cuda_graph_config, get_alloc_len_per_decode()
    graphs = WidthGraphs(FakeRunner(), NODES + 1)
    graphs.capture()
    for width in graphs.widths:
        with graphs.of_width(width):
            assert get_alloc_len_per_decode() == room == NODES + 1
            assert get_spec().speculative_num_draft_tokens == NODES + 1
            assert get_exec().graph.cuda_graph_config is config


def test_wide_graphs_are_captured_for_small_batches_alone(graphs):
    runner = graphs._runner
    every = runner.decode_cuda_graph_runner.batch_sizes
    for width in graphs.widths[:-1]:
        with graphs.of_width(width):
            captured = runner.decode_cuda_graph_runner.batch_sizes
        assert captured == [size for size in every if size * width <= MOST_ROWS]
    assert batch_sizes(64, [16, 32]) == [16]


def test_policy_never_asks_for_a_graph_that_was_not_captured():
    policy = LengthPolicy((1, 4, 8, 16), lambda rows: 1.0, MOST_ROWS)
    assert policy._useful(16, batch=32) == [1, 4, 8, 16]
    assert policy._useful(16, batch=48) == [1, 4, 8]
    assert policy._useful(16, batch=200) == [1]


@pytest.mark.parametrize(
    ("given", "captures"),
    [
        ({}, True),
        ({"disable_cuda_graph": True}, False),
        ({"cuda_graph_backend_decode": "disabled"}, False),
        ({"cuda_graph_config": {"decode": {"backend": "disabled"}}}, False),
    ],
)
def test_graphs_switched_off_in_any_way_are_noticed(published, given, captures):
    published(**given)
    assert captures_decode_graphs("cuda") is captures
    assert not captures_decode_graphs("cpu")


@pytest.mark.parametrize(
    ("backend", "widths"),
    [("fa3", (16,)), ("flashinfer", (1, 2, 3, 4, 6, 8, 12, 16)), ("triton", (1, 2, 3, 4, 6, 8, 12, 16))],
)
def test_without_graphs_widths_are_free_where_the_backend_takes_them(published, backend, widths):
    published(disable_cuda_graph=True, attention_backend=backend)
    assert possible_widths(None, NODES + 1, Options().length, "cuda").values == widths
