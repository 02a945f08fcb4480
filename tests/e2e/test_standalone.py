"""SGLang's own drafting with a draft model (STANDALONE) on a CPU: the baseline of the methods that draft beside the target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.support.servers.engine import ServerSpec
from tests.support.servers.forked import SglangServer, running
from tests.support.tiny_drafts import spelling_draft
from tests.support.tiny_model import texts_of, write_spelling_model

CHAIN, ANSWER = 3, 48
FLAGS = ("--context-length", "512")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_spelling_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module", params=[1, 0.6])
def draft(request, target, tmp_path_factory):
    return spelling_draft(target, tmp_path_factory.mktemp("draft"), request.param)


@pytest.fixture(scope="module")
def prompts(target) -> list[list[int]]:
    return texts_of(target, 6, 60)


@pytest.fixture(scope="module")
def expected(target, prompts) -> list[list[int]]:
    """Greedy answers under transformers."""
    return [_greedy(_load(target), prompt, ANSWER) for prompt in prompts]


@pytest.fixture(scope="module")
def server(target, draft, logs) -> Iterator[SglangServer]:
    spec = ServerSpec(
        f"standalone-{draft.name}",
        target,
        "STANDALONE",
        dtype="float32",
        nodes=CHAIN,
        draft=draft,
        flags=FLAGS,
        max_total_tokens=8192,
    )
    with running(spec, logs) as server:
        yield server


def test_it_answers_as_plain_decoding_in_as_many_steps_as_its_draft_is_worth(
    server, target, draft, prompts, expected
):
    answers = server.generate_many(prompts, len(prompts), temperature=0, max_new_tokens=ANSWER)
    assert [answer["output_ids"] for answer in answers] == expected
    model = _load(draft)
    steps = [_steps(model, prompt, answer) for prompt, answer in zip(prompts, expected, strict=True)]
    assert [answer["meta_info"]["spec_verify_ct"] for answer in answers] == steps
    assert sum(steps) < 0.8 * len(prompts) * (ANSWER - 1)


def _steps(draft, prompt: list[int], answer: Sequence[int]) -> int:
    """Steps that chains of this draft take. SGLang's draft never sees a text's first token: it is a shifted one, as EAGLE's."""
    text, known, steps = [*prompt, *answer], len(prompt) + 1, 0
    while known < len(text):
        proposed = _greedy(draft, text[1:known], CHAIN)
        right = [a == b for a, b in zip(proposed, text[known:], strict=False)]
        known += 1 + [*right, False].index(False)
        steps += 1
    return steps


def _load(folder):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder)


def _greedy(model, text: Sequence[int], count: int) -> list[int]:
    import torch

    ids = torch.tensor([text])
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
    found = model.generate(ids, max_new_tokens=count, min_new_tokens=count, **settings)
    return found[0, len(text) :].tolist()
