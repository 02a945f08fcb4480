"""A head goes on from the right states after every step, whoever proposed what was accepted: what it drafts is known beforehand, from its
own weights and the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.support.servers.engine import HEAD_STEPS, ServerSpec
from tests.support.servers.forked import SglangServer, running
from tests.support.tiny_drafts import spelling_draft
from tests.support.tiny_head import read_tiny_head, train_tiny_head
from tests.support.tiny_model import texts_of, write_spelling_model

pytest.importorskip("sglang")

if TYPE_CHECKING:
    import torch

    from sglang_patches.training.eagle3 import Eagle3

# Algorithm and branches of the head's trees. A branch's second forward reads the branch's own token: its tree is known that far.
CASES = [
    ("STANDALONE", 1),
    ("EAGLE3", 1),
    ("EAGLE", 2),
    pytest.param(("EAGLE3", 4), marks=pytest.mark.long),
    pytest.param(("STANDALONE", 2), marks=pytest.mark.long),
]
KNOWN_OF_TREES = 2
ANSWER = 64
# STANDALONE's draft reads shifted tokens, so its KV at a prompt's end belongs to one answer; SGLang's prefix cache hands it to others.
FLAGS = ("--context-length", "512", "--specstore-length", "static", "--disable-radix-cache")
WANTED = {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True}
TELLING = {"custom_params": {"specstore": {"sources": True}}}
# Of a text and how much of it is known: what a head expects of each next token behind its likeliest ones, [HEAD_STEPS, vocabulary].
Draft = Callable[[Sequence[int], int], "torch.Tensor"]


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


class Head(NamedTuple):
    """branches: of its trees. expects: known from its weights."""

    name: str
    branches: int
    folder: Path
    expects: Draft


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def head(request, target, tmp_path_factory) -> Head:
    (name, branches), folder = request.param, tmp_path_factory.mktemp("head")
    if name == "STANDALONE":
        folder = spelling_draft(target, folder, 0.6)
        return Head(name, branches, folder, _small_model(folder))
    train_tiny_head(name, target, folder)
    return Head(name, branches, folder, _eagle(target, read_tiny_head(name, target, folder)))


@pytest.fixture(scope="module")
def server(target, head, logs) -> Iterator[SglangServer]:
    spec = ServerSpec(
        f"beside-{head.name}-{head.branches}",
        target,
        head.name,
        dtype="float32",
        nodes=31,
        draft=head.folder,
        flags=FLAGS,
        environment={"SPECSTORE_ENDPOINT": "embedded"},
        max_total_tokens=8192,
        beside_head=True,
        branches=head.branches,
    )
    with running(spec, logs) as server:
        yield server


def test_the_head_drafts_what_its_weights_say_after_steps_of_every_kind(server, head, prompts, expected):
    for prompt in prompts:  # other answers, from which the datastore proposes what is not said
        server.generate(prompt, temperature=3.0, max_new_tokens=ANSWER, ignore_eos=True)
    seen = []
    for _ in range(2):  # the second time the datastore knows the answers
        answers = server.generate_many(prompts, len(prompts), **WANTED, **TELLING)
        assert [answer["output_ids"] for answer in answers] == expected
        for prompt, answer in zip(prompts, answers, strict=True):
            seen += _steps(head, prompt, answer)
    assert sum(step.follows_foreign for step in seen) > len(prompts), (
        "no step followed one that retrieval won"
    )
    wrong = [step for step in seen if not step.of_head <= step.possible]
    assert not wrong, f"a token is said to be the head's that it did not draft: {wrong}"
    assert (head.branches > 1) == any(step.of_head > step.right for step in seen), (
        "trees and they alone have siblings"
    )
    # Now and then a long find that retrieval is sure of takes all rows.
    short = [step for step in seen if step.brought <= step.right]
    assert len(short) < 0.1 * len(seen), short
    drafted, accepted = (_total(answers, which) for which in ("drafted", "accepted"))
    assert sum(drafted.values()) - drafted["head"] > 0 < accepted["head"]


@dataclass(frozen=True)
class Step:
    """brought: tokens of the step. right: how many of the likeliest that the head drafts are the text's. possible: how many of the text's
    next tokens can be in its tree. of_head: place behind the last token that is said to be the head's. follows_foreign: whether the step
    before accepted a token that the head did not draft."""

    brought: int
    right: int
    possible: int
    of_head: int
    follows_foreign: bool


def _steps(head: Head, prompt: list[int], answer: dict) -> list[Step]:
    """The steps of an answer: each ends with a token of the target's own."""
    text, sources = [*prompt, *answer["output_ids"]], answer["meta_info"]["specstore"]["sources"]
    ends = [at + 1 for at, source in enumerate(sources) if source == "target"]
    assert ends[0] == 1, "the prompt's forward brings the first"
    steps, foreign = [], False
    for begin, end in pairwise(ends):
        known, brought = len(prompt) + begin, sources[begin:end]
        of_head = max((at + 1 for at, source in enumerate(brought) if source == "head"), default=0)
        right, possible = _drafted(head, text, known)
        steps.append(Step(len(brought), right, possible, of_head, foreign))
        foreign = not {"head", "target"} >= set(brought)
    return steps


def _drafted(head: Head, text: list[int], known: int) -> tuple[int, int]:
    """How many of the text's next tokens are in the chain of the head's likeliest tokens, and how many may be in its tree."""
    ranks = [
        int((row > row[token]).sum())
        for row, token in zip(head.expects(text, known), text[known:], strict=False)
    ]
    right = [rank == 0 for rank in ranks]
    if head.branches == 1:
        return (chain := [*right, False].index(False)), chain
    sure = [*right[:KNOWN_OF_TREES], False].index(False)
    return sure, HEAD_STEPS if ranks and ranks[0] < head.branches else 0


def _total(answers: Sequence[dict], which: str) -> dict[str, int]:
    found: dict[str, int] = {"head": 0}
    for answer in answers:
        for source, count in answer["meta_info"]["specstore"][which].items():
            found[source] = found.get(source, 0) + count
    return found


def _small_model(folder: Path) -> Draft:
    import torch

    model = _load(folder)

    @torch.inference_mode()
    def expects(text: Sequence[int], known: int) -> torch.Tensor:
        rows, drafted = (
            [],
            list(text[1:known]),
        )  # SGLang's draft never sees a text's first token: it is a shifted one, as EAGLE's
        for _ in range(HEAD_STEPS):
            rows.append(model(torch.tensor([drafted])).logits[0, -1])
            drafted.append(int(rows[-1].argmax()))
        return torch.stack(rows)

    return expects


def _eagle(target: Path, network: Eagle3) -> Draft:
    """What the head expects behind the target's states of the whole text."""
    import torch

    model = _load(target)

    @torch.inference_mode()
    def expects(text: Sequence[int], known: int) -> torch.Tensor:
        rows: list[torch.Tensor] = []
        drafted: list[int] = []
        states = model(torch.tensor([list(text[:known])]), output_hidden_states=True).hidden_states
        read = torch.cat([states[layer][0, : known - 1] for layer in network.layers], -1)
        for step in range(HEAD_STEPS):
            embedded = model.get_input_embeddings()(torch.tensor([*text[1:known], *drafted]))
            behind = torch.cat([read, read.new_zeros(step, read.shape[1])])  # nothing that counts reads these
            told = network.unroll(behind, embedded, step + 1)[step]
            row = torch.full((model.config.vocab_size,), -torch.inf)
            rows.append(row.index_put((network.kept,), network.logits(told[-1])))
            drafted.append(int(rows[-1].argmax()))
        return torch.stack(rows)

    return expects


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
