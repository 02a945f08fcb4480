"""A head goes on from the right states after every step, whoever proposed what was accepted: what it drafts is known beforehand, from its
own weights and the text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.servers.engine import HEAD_STEPS, ServerSpec
from tests.support.servers.forked import SglangServer, running
from tests.support.tiny_drafts import spelling_draft
from tests.support.tiny_head import train_tiny_head
from tests.support.tiny_model import texts_of, write_spelling_model

pytest.importorskip("sglang")

HEADS = ("STANDALONE", "EAGLE3")
ANSWER = 64
# STANDALONE's draft reads shifted tokens, so its KV at a prompt's end belongs to one answer; SGLang's prefix cache hands it to others.
FLAGS = ("--context-length", "512", "--specstore-length", "static", "--disable-radix-cache")
WANTED = {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True}
TELLING = {"custom_params": {"specstore": {"sources": True}}}
# Of a text and how much of it is known: the tokens that a head drafts.
Draft = Callable[[Sequence[int], int], list[int]]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_spelling_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts(target) -> list[list[int]]:
    return texts_of(target, 6, 60)


@pytest.fixture(scope="module")
def expected(target, prompts) -> list[list[int]]:
    """Greedy answers under transformers."""
    model = _load(target)
    return [_greedy(model, prompt, ANSWER) for prompt in prompts]


@pytest.fixture(scope="module", params=HEADS)
def head(request, target, tmp_path_factory) -> tuple[str, Path]:
    """Name and folder."""
    folder = tmp_path_factory.mktemp("head")
    if request.param == "EAGLE3":
        return request.param, train_tiny_head(target, folder)
    return request.param, spelling_draft(target, folder, 0.6)


@pytest.fixture(scope="module")
def server(target, head, logs) -> Iterator[SglangServer]:
    name, folder = head
    spec = ServerSpec(
        f"beside-{name}",
        target,
        name,
        dtype="float32",
        nodes=31,
        draft=folder,
        flags=FLAGS,
        environment={"SPECSTORE_ENDPOINT": "embedded"},
        max_total_tokens=8192,
        beside_head=True,
    )
    with running(spec, logs) as server:
        yield server


def test_the_head_drafts_what_its_weights_say_after_steps_of_every_kind(
    server, target, head, prompts, expected
):
    draft = _drafts(target, *head)
    for prompt in prompts:  # other answers, from which the datastore proposes what is not said
        server.generate(prompt, temperature=3.0, max_new_tokens=ANSWER, ignore_eos=True)
    seen = []
    for _ in range(2):  # the second time the datastore knows the answers
        answers = server.generate_many(prompts, len(prompts), **WANTED, **TELLING)
        assert [answer["output_ids"] for answer in answers] == expected
        for prompt, answer in zip(prompts, answers, strict=True):
            seen += _steps(draft, prompt, answer)
    assert sum(step.follows_foreign for step in seen) > len(prompts), (
        "no step followed one that retrieval won"
    )
    assert all(step.of_head <= step.right for step in seen), (
        "a token is said to be the head's that it did not draft"
    )
    # Now and then a long find that retrieval is sure of takes all rows.
    short = [step for step in seen if step.brought <= step.right]
    assert len(short) < 0.1 * len(seen), short
    drafted, accepted = (_total(answers, which) for which in ("drafted", "accepted"))
    assert sum(drafted.values()) - drafted["head"] > 0 < accepted["head"]


@dataclass(frozen=True)
class Step:
    """brought: tokens of the step. right: how many of those that the head drafts are the text's. of_head: place behind the last token that
    is said to be the head's. follows_foreign: whether the step before accepted a token that the head did not draft."""

    brought: int
    right: int
    of_head: int
    follows_foreign: bool


def _steps(draft: Draft, prompt: list[int], answer: dict) -> list[Step]:
    """The steps of an answer: each ends with a token of the target's own."""
    text, sources = [*prompt, *answer["output_ids"]], answer["meta_info"]["specstore"]["sources"]
    ends = [at + 1 for at, source in enumerate(sources) if source == "target"]
    assert ends[0] == 1, "the prompt's forward brings the first"
    steps, foreign = [], False
    for begin, end in pairwise(ends):
        known, brought = len(prompt) + begin, sources[begin:end]
        right = [a == b for a, b in zip(draft(text, known), text[known:], strict=False)]
        of_head = max((at + 1 for at, source in enumerate(brought) if source == "head"), default=0)
        steps.append(Step(len(brought), [*right, False].index(False), of_head, foreign))
        foreign = not {"head", "target"} >= set(brought)
    return steps


def _total(answers: Sequence[dict], which: str) -> dict[str, int]:
    found: dict[str, int] = {"head": 0}
    for answer in answers:
        for source, count in answer["meta_info"]["specstore"][which].items():
            found[source] = found.get(source, 0) + count
    return found


def _drafts(target: Path, name: str, folder: Path) -> Draft:
    if name == "EAGLE3":
        return _eagle(target, folder)
    model = _load(folder)
    # SGLang's draft never sees a text's first token: it is a shifted one, as EAGLE's.
    return lambda text, known: _greedy(model, list(text[1:known]), HEAD_STEPS)


def _eagle(target: Path, folder: Path) -> Draft:
    """What the head drafts behind the target's states of the whole text."""
    import torch
    from safetensors.torch import load_file

    from sglang_patches.training.heads import Eagle3, read_layers

    model = _load(target)
    weights = load_file(folder / "model.safetensors")
    layers = read_layers(model.config.num_hidden_layers)
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [layer - 1 for layer in layers]
    kept = weights.pop("d2t") + torch.arange(config["draft_vocab_size"])
    weights.pop("t2d")
    network = Eagle3(model.config, layers, kept).eval()
    network.load_state_dict(weights)

    @torch.inference_mode()
    def draft(text: Sequence[int], known: int) -> list[int]:
        drafted: list[int] = []
        states = model(torch.tensor([list(text[:known])]), output_hidden_states=True).hidden_states
        read = torch.cat([states[layer][0, : known - 1] for layer in layers], -1)
        for step in range(HEAD_STEPS):
            embedded = model.get_input_embeddings()(torch.tensor([*text[1:known], *drafted]))
            behind = torch.cat([read, read.new_zeros(step, read.shape[1])])  # nothing that counts reads these
            told = network.unroll(behind, embedded, step + 1)[step]
            drafted.append(int(kept[network.logits(told[-1:]).argmax()]))
        return drafted

    return draft


def _load(folder: Path):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder).eval()


def _greedy(model, ids: Sequence[int], count: int) -> list[int]:
    import torch

    text = list(ids)
    with torch.inference_mode():
        for _ in range(count):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(ids) :]
