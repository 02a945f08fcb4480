"""What a server and its draft process count while they serve is what a replay of their traces counts."""

from __future__ import annotations

import pytest

from benchmarks.draft_trace import tracing
from benchmarks.draft_trace.__main__ import settled_counts
from benchmarks.draft_trace.replay import replayed
from sglang_patches.launch.servers import ServerSpec
from tests.support.servers import running
from tests.support.tiny_drafts import spelling_draft
from tests.support.tiny_exits import train_tiny_exits
from tests.support.tiny_model import texts_of, write_spelling_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_spelling_model(tmp_path_factory.mktemp("model"))


@pytest.mark.long
@pytest.mark.parametrize("method", ["SAGUARO", "MIRROR"])
def test_a_replay_counts_what_the_server_counted(model, logs, tmp_path, method):
    traces, draft_folder = tmp_path / "traces", tmp_path / "draft"
    traces.mkdir()
    draft_folder.mkdir()
    environment = {}
    if method == "MIRROR":
        environment["SPECSTORE_EARLY_EXIT"] = str(train_tiny_exits(model, tmp_path / "exits.safetensors"))
    spec = ServerSpec(
        f"traced-{method}",
        model,
        method,
        dtype="float32",
        nodes=7,
        draft=spelling_draft(model, draft_folder, 0.6),
        flags=("--context-length", "512", "--enable-metrics"),
        environment=tracing(traces) | environment,
        max_total_tokens=4096,
    )
    with running(spec, logs) as server:
        prompts = texts_of(model, 5, 40)
        server.generate_many(prompts, 3, temperature=0, max_new_tokens=32)
        server.generate_many(prompts, 3, temperature=1.0, max_new_tokens=32)
        counted = settled_counts(server)
    if method == "MIRROR":
        assert counted["specstore_early_exit_tokens{other}"] > 0
    for what in ("speculation_lookups{hit}", "draft_guesses{0}", "accepted_nodes{draft_model}"):
        assert counted[f"specstore_{what}"] > 0
    assert replayed(traces) == counted
