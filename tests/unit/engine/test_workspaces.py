"""Workspaces: what one session has read drafts for another that names the same one, within a budget."""

import time

import numpy as np
import pytest

from datastore_service.engine.engine import Engine
from datastore_service.engine.limits import Limits
from datastore_service.engine.session import LONGEST_GRAM
from datastore_service.engine.workspaces import BLOCK, LEAST_TOKENS, TEXTS, Workspaces
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Budget, Entry, Opening, Status
from tests.tenant_names import PAIRS

VOCAB = 100_000
FILE = np.arange(1000, 1000 + 3 * BLOCK, dtype=np.int32)
CONTEXT, FOUND = FILE[:8], FILE[8:12].tolist()
CAPACITY = LEAST_TOKENS // TEXTS


def engine(tokens=LEAST_TOKENS, **limits):
    return Engine(VOCAB, limits=Limits(workspace_tokens=tokens, **limits))


def reads(workspace, text=FILE, session="reader", **entry):
    """A whole session whose prompt is the text."""
    opening = Opening(prompt_length=len(text), publish=False, workspace=workspace)
    return Entry(session, 0, text, opening=opening, closing=True, **entry)


def asks(workspace, session="asker"):
    opening = Opening(prompt_length=len(CONTEXT), publish=False, workspace=workspace)
    return Entry(session, 0, CONTEXT, budget=Budget(4, children=1), opening=opening, closing=True)


def drafted(engine, *entries):
    replies = engine.step(entries)
    assert all(reply.status is Status.OK for reply in replies)
    return [reply.tree.tokens.tolist() for reply in replies]


def test_a_prompt_that_one_session_has_read_drafts_for_another():
    made = engine(8 * LEAST_TOKENS)
    made.step([reads("project")])
    others = [asks("project", "1"), asks("other", "2"), asks("", "3")]
    assert drafted(made, *others) == [FOUND, [], []]
    stats = made.stats()
    assert (stats.workspaces, stats.workspace_tokens) == (1, len(FILE) + 1)
    assert stats.workspace_bytes > 0 and stats.tiers[Tier.LIVE].tokens == 0


@pytest.mark.parametrize("pair", [pair for pair, names in PAIRS.items() if all(names)])
def test_names_that_look_alike_are_two_workspaces(pair):
    one, other = PAIRS[pair]
    made = engine()
    made.step([reads(other)])
    assert drafted(made, asks(one, "1"), asks(other, "2")) == [[], FOUND]


def test_an_answer_is_shared_with_its_prompt():
    made = engine()
    opening = Opening(prompt_length=4, publish=False, workspace="project")
    made.step([Entry("s", 0, FILE[:4], opening=opening)])
    made.step([Entry("s", 4, FILE[4:], closing=True)])
    assert drafted(made, asks("project")) == [FOUND]


def test_a_session_that_is_open_sees_what_others_add():
    made = engine()
    opening = Opening(prompt_length=len(CONTEXT), workspace="project")
    ask = Entry("s", 0, CONTEXT, budget=Budget(4, children=1), opening=opening)
    again = Entry("s", len(CONTEXT), budget=Budget(4, children=1))
    assert drafted(made, ask) == [[]]
    made.step([reads("project")])
    assert drafted(made, again) == [FOUND]
    made.flush_workspace("project")
    assert drafted(made, again) == [[]]


@pytest.mark.parametrize("kept_from", ["withheld", "flushed", "no budget"])
def test_what_is_not_to_be_shared_is_not(kept_from):
    made = engine(0 if kept_from == "no budget" else LEAST_TOKENS)
    if kept_from == "flushed":
        said = reads("project")
        said.closing = False
        made.step([said])
        made.flush(session="reader")
        made.step([Entry("reader", closing=True)])
    else:
        made.step([reads("project", withheld=kept_from == "withheld")])
    assert drafted(made, asks("project")) == [[]] and not made.has_workspace("project")


@pytest.mark.parametrize("tier", [None, Tier.LIVE, Tier.SESSION])
def test_flushing_all_or_the_live_tier_forgets_workspaces(tier):
    made = engine()
    made.step([reads("project")])
    made.flush(tier)
    assert made.has_workspace("project") == (tier is Tier.SESSION)
    assert drafted(made, asks("project")) == [FOUND if tier is Tier.SESSION else []]


def test_one_workspace_is_forgotten_and_may_come_again():
    made = engine()
    made.step([reads("a", session="1"), reads("b", session="2")])
    made.flush_workspace("a")
    assert drafted(made, asks("a", "3"), asks("b", "4")) == [[], FOUND]
    made.step([reads("a")])
    assert drafted(made, asks("a")) == [FOUND]


def test_a_beginning_that_is_known_is_not_added_again():
    """An agent sends the whole conversation in each request."""
    kept, text = Workspaces(LEAST_TOKENS * TEXTS, lambda: None), np.arange(10 * BLOCK + 5, dtype=np.int32)
    kept.add("a", text[: 4 * BLOCK + 3])
    assert kept.tokens == 4 * BLOCK + 3 + 1
    for _ in range(3):
        kept.add("a", text)
    added = LONGEST_GRAM + 6 * BLOCK + 5 + 1
    assert kept.tokens == 4 * BLOCK + 3 + 1 + added
    (both,) = kept.texts("a")
    assert [document.tolist() for document in both.documents()][1] == text[
        4 * BLOCK - LONGEST_GRAM :
    ].tolist()
    kept.add("a", text[: BLOCK - 1])  # without a whole block
    kept.add("b", text[:BLOCK])  # of another workspace
    assert (kept.tokens, len(kept)) == (4 * BLOCK + 3 + 1 + added + BLOCK + 1, 2)


def test_a_long_text_is_added_whole_in_pieces():
    kept, text = Workspaces(LEAST_TOKENS, lambda: None), np.arange(5 * CAPACITY, dtype=np.int32)
    kept.add("a", text)
    documents = [document for part in kept.texts("a")[::-1] for document in part.documents()]
    joined = [documents[0], *(document[LONGEST_GRAM:] for document in documents[1:])]
    assert np.concatenate(joined).tolist() == text.tolist() and len(documents) > 5


def test_the_oldest_text_leaves_for_a_new_one_whosever_it_is():
    kept, changes = Workspaces(LEAST_TOKENS, lambda: changes.append(1)), []
    texts = [np.arange(2 * BLOCK, dtype=np.int32) + 1000 * number for number in range(2 * TEXTS)]
    for number, text in enumerate(texts):
        kept.add(str(number), text)
    assert len(kept) == TEXTS and "0" not in kept and str(2 * TEXTS - 1) in kept
    assert kept.tokens <= LEAST_TOKENS and len(changes) == 2 * TEXTS
    kept.add("0", texts[0])  # what has left is known no more
    assert "0" in kept and len(kept) == TEXTS


def test_a_text_leaves_when_it_has_its_greatest_age(monkeypatch):
    made = engine(live_seconds=100)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    made.step([reads("old", session="1")])
    monkeypatch.setattr(time, "time", lambda: 1100.0)
    made.step([reads("new", session="2")])
    made.expire()
    assert drafted(made, asks("old", "3"), asks("new", "4")) == [FOUND, FOUND]
    monkeypatch.setattr(time, "time", lambda: 1101.0)
    made.expire()
    assert drafted(made, asks("old", "5"), asks("new", "6")) == [[], FOUND]


def test_a_text_of_exactly_its_greatest_age_stays_beside_an_older_one_that_leaves(monkeypatch):
    kept = Workspaces(LEAST_TOKENS, lambda: None)
    for now, name in ((999.0, "older"), (1000.0, "as old")):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        kept.add(name, FILE)
    kept.expire(1000.0)
    assert "older" not in kept and "as old" in kept


@pytest.mark.parametrize("tokens", [1, LEAST_TOKENS - 1, -1])
def test_a_budget_in_which_no_text_fits_is_refused(tokens):
    with pytest.raises(ValueError, match="workspace_tokens: "):
        Limits(workspace_tokens=tokens)


def test_a_budget_is_memory():
    assert Limits(workspace_tokens=LEAST_TOKENS).most_bytes > Limits().most_bytes
    made = Workspaces(LEAST_TOKENS, lambda: None)
    for number in range(TEXTS):
        made.add(str(number), FILE)
    assert made.nbytes <= Limits(workspace_tokens=LEAST_TOKENS).most_bytes - Limits().most_bytes
