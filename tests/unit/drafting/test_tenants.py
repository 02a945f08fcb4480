"""The draft side keeps tenants apart: what it learns of one, and what its own datastore keeps of one."""

import numpy as np
import pytest

from datastore_service.client import open_datastore
from datastore_service.protocol.types import Namespace
from sglang_patches.draft_side.draft import Draft
from sglang_patches.draft_side.seams import Row
from sglang_patches.draft_side.side import DraftParts, DraftSide, Learner
from sglang_patches.exchange.messages import GREEDY, Committed, Opened
from sglang_patches.exchange.text import Text
from sglang_patches.exchange.trie import Trie
from sglang_patches.exchange.wire import frame_of, messages_from_worker
from sglang_patches.methods.double import DatastorePhrases, OwnDatastorePhrases
from sglang_patches.methods.saguaro import GeometricFanOut, Rollouts
from tests.support.agreeing_model import model
from tests.support.draft_side import FunctionModel

TEXT = np.arange(1, 9, dtype=np.int32)
SESSIONS = {"first": "a", "second": "b", "third": "a"}


class Recording(GeometricFanOut):
    def __init__(self):
        super().__init__()
        self.learned = set()

    def learn(self, draft, path, tokens):
        self.learned.add(draft.session)
        super().learn(draft, path, tokens)


def test_outcomes_of_a_tenant_teach_that_tenant_s_predictor_alone():
    made = []

    def learner():
        made.append(Recording())
        return Learner(made[-1], Rollouts(4))

    side = DraftSide(FunctionModel(model(1.0)), DraftParts(learner), 8, 8)
    opened = [Opened(session, TEXT, 1, tenant=tenant) for session, tenant in SESSIONS.items()]
    side.hear(messages_from_worker().feed(frame_of(opened)))
    side.work()
    side.hear([Committed(session, len(TEXT), np.array([9], np.int32), 2) for session in SESSIONS])
    assert [predictor.learned for predictor in made] == [{"first", "third"}, {"second"}]


def make_draft(session, tenant, text):
    text = np.array(text, np.int32)
    return Draft(session, Text(text), GREEDY, Trie(len(text)), tenant=tenant)


@pytest.fixture
def datastore():
    return open_datastore("embedded", Namespace("m", "0" * 64), 1000, tenants=True)


def test_a_draft_process_s_own_datastore_keeps_tenants_apart(datastore):
    phrases, said = OwnDatastorePhrases(datastore, 4, 5.0), [1, 2, *range(500, 520)]
    first = make_draft("first", "a", said)
    first.published_from = 2
    phrases.phrases([Row(first, 0)], 8)
    phrases.closed(first)
    asked = [make_draft(f"asks {tenant}", tenant, [3, 4, *said[2:8]]) for tenant in ("a", "b", "")]
    found = phrases.phrases([Row(draft, 0) for draft in asked], 8)
    assert [tree.tokens.tolist() for tree in found] == [said[8:12], [], []]


def test_a_session_of_a_draft_process_s_own_ends_under_its_tenant(datastore):
    """Else it would stay open for ever."""
    phrases, draft = OwnDatastorePhrases(datastore, 4, 5.0), make_draft("first", "a", TEXT)
    phrases.phrases([Row(draft, 0)], 8)
    sessions = datastore._engines["a"].sessions
    assert len(sessions()) == 1
    phrases.forgotten(draft)
    assert not sessions()


def test_the_worker_s_session_is_asked_about_under_its_tenant(datastore):
    draft = make_draft("s", "a", TEXT)
    assert DatastorePhrases(datastore, 4, 5.0)._entry(draft, ()).tenant == "a"
