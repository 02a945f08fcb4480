"""For which row counts of a draft forward SGLang captures graphs."""

import dataclasses
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang.srt.arg_groups.overrides import resolved_view  # noqa: E402

from sglang_patches.draft_process.runner import described_graphs, server_args  # noqa: E402
from tests.unit.plugin.platform import override_platform  # noqa: E402
from tests.unit.plugin.resolution import PLATFORMS, write_model  # noqa: E402
from tests.unit.step.test_start_draft import SETTINGS  # noqa: E402


def captured(tmp_path, platform, rows, sessions):
    settings = dataclasses.replace(
        SETTINGS,
        arguments={"model_path": write_model(tmp_path / "model", "dense")},
        device="cuda:0",
        tokens=32768,
        sessions=sessions,
        rows=rows,
        context_length=4096,
    )
    with override_platform(**PLATFORMS[platform]):
        return resolved_view(server_args(settings)).cuda_graph_config.decode.bs


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("rows", [1, 5, 24, 300])
@pytest.mark.parametrize("sessions", [1, 48, 4096])
def test_every_forward_has_a_graph_and_no_graph_is_larger_than_all(tmp_path, platform, rows, sessions):
    sizes = captured(tmp_path, platform, rows, sessions)
    assert max(sizes) == rows and len(sizes) == len(set(sizes))


def test_the_default_row_count_is_captured_in_steps(tmp_path):
    assert captured(tmp_path, "hopper", 24, 48) == [1, 2, 4, 8, 12, 16, 24]


@pytest.mark.parametrize(
    ("decode", "prefill", "said"),
    [
        (
            [1, 2, 4],
            [4, 8],
            "replay graphs of 1, 2, 4 rows, and those between are padded; prefills replay graphs of up to 8 tokens",
        ),
        (None, None, "forwards run without graphs; prefills run without graphs"),
    ],
)
def test_the_log_says_which(decode, prefill, said):
    runner = SimpleNamespace(
        decode_cuda_graph_runner=decode and SimpleNamespace(capture_bs=decode),
        prefill_cuda_graph_runner=prefill and SimpleNamespace(capture_num_tokens=prefill),
    )
    assert said in described_graphs(runner)
