"""What the draft side asks the datastore, of real engines: one of its own, and one behind gRPC that the worker uses too."""

import numpy as np
import pytest

from datastore_service import client
from datastore_service.client import open_datastore
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening, Status
from sglang_patches.draft_side.draft import Draft
from sglang_patches.draft_side.seams import Row
from sglang_patches.exchange.messages import GREEDY
from sglang_patches.exchange.text import Text
from sglang_patches.exchange.trie import Trie
from sglang_patches.methods.double import DatastorePhrases, OwnDatastorePhrases
from tests.support.draft_side import commit
from tests.support.servers.datastore import DatastoreService

NAMESPACE, VOCABULARY = Namespace("m", "0" * 64), 1000
PHRASE = [11, 12, 13, 14, 15, 16]
TEXT = [*PHRASE, 1, 2, *PHRASE[:3]]
DEPTH, DEADLINE = 4, 60.0


def make_draft(text=TEXT, session="s"):
    return Draft(session, Text(np.array(text, np.int32)), GREEDY, Trie(len(text)))


def chain_of(tree):
    """The likeliest path's tokens."""
    at, tokens = -1, []
    while (below := np.flatnonzero(tree.parents == at)).size:
        at = int(below[0])
        tokens.append(int(tree.tokens[at]))
    return tokens


def ask(phrases, draft, node=0, nodes=8):
    (tree,) = phrases.phrases([Row(draft, node)], nodes)
    return chain_of(tree)


@pytest.fixture
def own():
    return OwnDatastorePhrases(open_datastore("embedded", NAMESPACE, VOCABULARY), DEPTH, DEADLINE)


def test_a_phrase_follows_the_text_and_the_path(own):
    draft = make_draft()
    assert ask(own, draft)[:3] == PHRASE[3:]
    node = draft.trie.add(1, 0, PHRASE[3], 0.5)
    assert ask(own, draft, node)[:2] == PHRASE[4:]
    assert len(own.phrases([Row(draft, node)], 2)[0]) == 2


def test_rows_of_many_sessions_are_asked_about_at_once(own):
    drafts = [make_draft(session=f"s{at}") for at in range(3)]
    drafts[1].trie.add(1, 0, 99, 0.5)
    rows = [Row(drafts[0], 0), Row(drafts[1], 1), Row(drafts[2], 0), Row(drafts[1], 0)]
    first, unknown, third, fourth = map(chain_of, own.phrases(rows, 8))
    assert first == third == fourth and first[:3] == PHRASE[3:] and unknown[:3] != PHRASE[3:]


def test_committed_tokens_are_told_once_they_cannot_be_taken_back(own):
    draft = make_draft()
    ask(own, draft)
    commit(draft, [PHRASE[3], PHRASE[4]], 2)
    assert ask(own, draft)[:1] == PHRASE[5:]
    draft.verify([])
    assert draft.confirmed == len(TEXT) + 2 and ask(own, draft)[:1] == PHRASE[5:]


@pytest.mark.parametrize(("published_from", "known"), [(3, True), (None, False)])
def test_an_output_that_may_be_published_is_known_to_later_sessions(own, published_from, known):
    said = list(range(500, 520))
    first = make_draft([1, 2, 3, *said])
    first.published_from = published_from
    ask(own, first)
    own.closed(first)
    assert (ask(own, make_draft([1, 2, *said[:5]], "t"))[:3] == said[5:8]) is known


def test_a_prompt_is_never_published(own):
    prompt = list(range(500, 520))
    first = make_draft([*prompt, 1, 2])
    first.published_from = len(prompt)
    ask(own, first)
    own.closed(first)
    assert ask(own, make_draft([4, 5, *prompt[:5]], "t"))[:1] != prompt[5:6]


def test_a_session_that_begins_again_has_its_new_text(own):
    before, after = make_draft(), make_draft([1, 2, 21, 22, 23, 1, 2, 21])
    ask(own, before)
    own.forgotten(before)
    assert ask(own, after)[:2] == [22, 23]
    own.closed(after)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with DatastoreService(tmp_path_factory.mktemp("service") / "log", "--log-level", "warning") as process:
        yield process


@pytest.fixture
def patient(monkeypatch):
    """The service is there, however slow it is."""
    monkeypatch.setattr(client, "GREETING_SECONDS", DEADLINE)


@pytest.fixture
def worker(service, patient):
    datastore = open_datastore(service.endpoint, NAMESPACE, VOCABULARY)
    yield datastore
    datastore.close()


@pytest.fixture
def shared(service, patient):
    datastore = open_datastore(service.endpoint, NAMESPACE, VOCABULARY)
    yield DatastorePhrases(datastore, DEPTH, DEADLINE)
    datastore.close()


def tell(worker, session, start, tokens, **fields):
    (reply,) = worker.step([Entry(session, start, np.array(tokens, np.int32), **fields)], DEADLINE)
    assert reply.status is Status.OK
    return reply


def test_the_workers_session_is_asked_about(worker, shared):
    draft = make_draft(session="shared")
    assert ask(shared, draft) == []  # the worker has not opened it
    tell(worker, "shared", 0, TEXT, opening=Opening(prompt_length=len(TEXT)))
    assert ask(shared, draft)[:3] == PHRASE[3:]
    commit(draft, [PHRASE[3]], 2)
    assert ask(shared, draft)[:2] == PHRASE[4:]
    reply = tell(worker, "shared", len(TEXT), [77, 78], budget=Budget(4))  # the step was taken back
    assert reply.known == len(TEXT) + 2, "the draft side has sent what the worker takes back"
    tell(worker, "shared", len(TEXT) + 2, [], closing=True)


def test_the_draft_side_leaves_no_session_behind(service, worker, shared):
    draft = make_draft(session="left")
    tell(worker, "left", 0, TEXT, opening=Opening(prompt_length=len(TEXT)))
    assert ask(shared, draft)
    tell(worker, "left", len(TEXT), [], closing=True)
    assert ask(shared, draft) == []  # it has not heard of the end yet
    shared.closed(draft)
    assert service.sessions() == 0


def test_a_service_that_is_gone_is_no_error(tmp_path):
    datastore = open_datastore(f"unix:{tmp_path}/none", NAMESPACE, VOCABULARY)
    assert ask(DatastorePhrases(datastore, DEPTH, 0.05), make_draft()) == []
    datastore.close()
