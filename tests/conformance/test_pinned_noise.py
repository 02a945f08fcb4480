"""Real servers whose seeds are pinned (`pinned_plugin`) say the same, token for token, with every draft, with the datastore alone, and
with a draft process that is killed while they speak. `test_drafts` shows it for more settings in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_patches.methods.registry import METHODS
from tests.conformance.conftest import LYING_PLUGIN, Setup, drafting_spec, exit_of, plugin_path, start
from tests.conformance.drafts import AGREEMENTS, LYING
from tests.support.servers.forked import SglangServer, draft_processes
from tests.support.tiny_drafts import spelling_draft

PINNED_PLUGIN = Path(__file__).parent / "pinned_plugin"
SETUP = Setup(True, embedded=True, nodes=7, page_size=1, max_total_tokens=16384)
NEW_TOKENS = 200
WISHES = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 6, "min_p": 0.05},
    {"temperature": 1.3},
    {"temperature": 0.9, "top_k": 10, "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 0.0},
]
ALONE = "the datastore alone"


@pytest.mark.long
@pytest.mark.draft_process
def test_sampled_output_is_the_same_with_every_draft(
    method, spelling_model, prompts, logs, tmp_path, early_exits
):
    said, accepted, of_method = {}, {}, exit_of(method, early_exits)
    for draft in (ALONE, *AGREEMENTS, LYING):
        spec = _spec(method.name, draft, spelling_model, tmp_path, of_method)
        with start(spec, logs) as server:
            said[draft], accepted[draft] = _drawn(server, prompts)
            assert _drawn(server, prompts)[0] == said[draft], (
                "the seeds are not pinned, equality would show nothing"
            )
            if draft != ALONE:
                said[f"{draft}, killed"], _ = _drawn(server, prompts, lambda server=server: _kill(server))
    assert all(answers == said[ALONE] for answers in said.values()), {
        draft: sum(ours == theirs for ours, theirs in zip(answers, said[ALONE], strict=True))
        for draft, answers in said.items()
    }
    assert len(set(map(tuple, said[ALONE]))) == len(said[ALONE])
    assert accepted["1"] > accepted["0.3"] > 0, accepted


def _spec(name: str, draft: str, model: Path, folder: Path, of_method: dict[str, str]):
    if draft == ALONE:
        alone = next(method.name for method in METHODS.values() if not method.draft_process)
        return drafting_spec(alone, model, None, SETUP, "", plugin_path(PINNED_PLUGIN))
    (folder / draft).mkdir()
    folders = [PINNED_PLUGIN, *([LYING_PLUGIN] if draft == LYING else [])]
    copy = spelling_draft(model, folder / draft, AGREEMENTS.get(draft, 1))
    return drafting_spec(name, model, copy, SETUP, "", plugin_path(*folders) | of_method)


def _drawn(
    server: SglangServer, prompts: list[list[int]], disturb: Callable[[], None] | None = None
) -> tuple[list[list[int]], float]:
    """Answers, two of each kind, and the share of the draft model's tokens that were accepted: how many come in time is the machine's. Each
    request begins when the one before it speaks. `disturb` is called when all do."""
    streams = []
    for at, kind in enumerate(WISHES * 2):
        streams.append(server.stream(prompts[at], max_new_tokens=NEW_TOKENS, ignore_eos=True, **kind))
        next(streams[-1])
    with ThreadPoolExecutor(len(streams)) as pool:
        answers = [pool.submit(lambda stream=stream: list(stream)[-1]) for stream in streams]
        if disturb is not None:
            disturb()
        answers = [answer.result() for answer in answers]
    told = [answer["meta_info"]["specstore"] for answer in answers]
    drafted, accepted = (
        sum(of[which].get("draft_model", 0) for of in told) for which in ("drafted", "accepted")
    )
    return [answer["output_ids"] for answer in answers], accepted / max(drafted, 1)


def _kill(server: SglangServer) -> None:
    """The draft process, and if it is back within the second, again."""
    limit, killed = time.monotonic() + 1.0, 0
    while time.monotonic() < limit or not killed:
        for process in draft_processes(server):
            process.kill()
            killed += 1
        time.sleep(0.05)
