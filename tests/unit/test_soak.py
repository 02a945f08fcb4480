"""What the soak judges by: its texts, its ledger of what must be found, its checks of drafts."""

import random
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from datastore_service.engine.engine import Engine
from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import Entry, Opening
from tests.soak import ledger as ledger_module
from tests.soak.ledger import Ledger
from tests.soak.operator import Operator
from tests.soak.tenant import PROBE_BUDGET, Plan, Tenant, followed, probe
from tests.soak.texts import IDS, PROBE, Texts
from tests.soak.worker import Worker


def chain(tokens) -> DraftTree:
    size = len(tokens)
    return DraftTree(
        np.array(tokens, np.int32),
        np.arange(-1, size - 1, dtype=np.int32),
        np.linspace(0.9, 0.1, size, dtype=np.float32),
        np.full(size, 2, np.uint8),
    )


def test_texts_are_the_same_for_a_seed_and_belong_to_their_tenant():
    texts, again, other = Texts(1, 3), Texts(1, 3), Texts(1, 4)
    for number in range(50):
        document = texts.document(number)
        assert np.array_equal(document.tokens, again.document(number).tokens)
        assert texts.owns(document.tokens) and not other.owns(document.tokens)
        assert document.tokens.min() >= 3 * IDS and document.tokens.max() < 4 * IDS
        assert document.prompt_length <= document.signature
        assert len(document.context) == PROBE and len(document.continuation) == 4


def test_an_engine_finds_a_document_by_its_context():
    texts, engine = Texts(0, 0), Engine(IDS)
    documents = [texts.document(number) for number in range(100)]
    for document in documents:
        opening = Opening(prompt_length=document.prompt_length)
        engine.step([Entry("s", 0, document.tokens, opening=opening, closing=True)])
    for document in documents:
        (reply,) = engine.step([probe(document, "p")])
        assert followed(reply.tree, document.continuation) == len(document.continuation)


class Cancelled(grpc.RpcError):
    def code(self):
        return grpc.StatusCode.CANCELLED

    def details(self):
        return "of a call"


@pytest.fixture
def clock(monkeypatch):
    """Steps of one second: each reading of the time is the next."""
    seconds = iter(range(1, 1000))
    monkeypatch.setattr(ledger_module.time, "monotonic", lambda: float(next(seconds)))
    return ledger_module.time.monotonic


def wiped(ledger, done, **snapshot):
    wipe = ledger.begin_wipe(**snapshot)
    ledger.end_wipe(wipe, done)
    return wipe


class TestLedger:
    @pytest.fixture
    def ledger(self, clock):
        return Ledger(bound=1000)

    def test_what_was_acknowledged_is_found_until_it_is_wiped(self, ledger, clock):
        ledger.published(1, begun=clock())
        assert ledger.found(1, asked=clock()) is True
        wiped(ledger, False)  # refused
        assert ledger.found(1, asked=clock()) is True
        wiped(ledger, True)
        assert ledger.found(1, asked=clock()) is False
        ledger.published(2, begun=clock())
        assert ledger.found(2, asked=clock()) is True

    def test_nothing_is_said_of_a_wipe_that_may_not_have_happened(self, ledger, clock):
        ledger.published(1, begun=clock())
        wiped(ledger, None)
        assert ledger.found(1, asked=clock()) is None
        wiped(ledger, True)
        assert ledger.found(1, asked=clock()) is False

    def test_nothing_is_said_of_a_query_or_a_closing_beside_a_wipe(self, ledger, clock):
        ledger.published(1, begun=clock())
        begun = asked = clock()
        wipe = ledger.begin_wipe()
        assert ledger.found(1, asked) is None
        ledger.published(2, begun)
        ledger.end_wipe(wipe, True)
        assert ledger.found(1, asked) is None
        assert ledger.found(1, clock()) is False
        assert ledger.found(2, clock()) is None

    def test_a_restored_snapshot_brings_back_what_it_held(self, ledger, clock):
        ledger.published(1, begun=clock())
        snapshot = clock(), clock()
        ledger.published(2, begun=clock())
        wiped(ledger, True)
        ledger.published(3, begun=clock())
        wiped(ledger, True, snapshot=snapshot)
        assert [ledger.found(number, clock()) for number in (1, 2, 3)] == [True, False, False]

    def test_a_restore_that_may_not_have_happened(self, ledger, clock):
        ledger.published(1, begun=clock())
        snapshot = clock(), clock()
        ledger.published(2, begun=clock())
        wiped(ledger, None, snapshot=snapshot)
        assert [ledger.found(number, clock()) for number in (1, 2)] == [True, None]

    def test_nothing_is_said_of_a_closing_beside_a_snapshot(self, ledger, clock):
        begun = clock()
        snapshot = clock(), clock()
        ledger.published(1, begun)
        wiped(ledger, True, snapshot=snapshot)
        assert ledger.found(1, clock()) is None

    def test_withheld_text_is_never_found(self, ledger, clock):
        ledger.withheld(1)
        assert ledger.found(1, clock()) is False

    def test_what_may_be_stored_again_later_may_come_back(self, ledger, clock):
        ledger.published(1, begun=clock(), once=False)
        assert ledger.found(1, clock()) is True
        wiped(ledger, True)
        assert ledger.found(1, clock()) is None

    def test_the_oldest_may_have_left_a_full_tier(self, ledger, clock):
        ledger.published(1, begun=clock())
        ledger.sent(1001)
        ledger.published(2, begun=clock())
        assert [ledger.found(number, clock()) for number in (1, 2)] == [None, True]

    def test_ended_sessions(self, ledger, clock):
        before = clock()
        assert not ledger.sessions_ended_since(before)
        ledger.begin_end_of_sessions()
        assert ledger.sessions_ended_since(clock())
        ledger.sessions_have_ended()
        assert ledger.sessions_ended_since(before) and not ledger.sessions_ended_since(clock())

    def test_samples_have_the_newest(self, ledger, clock):
        for number in range(100):
            ledger.published(number, begun=clock())
        sample = ledger.sample(20, random.Random(0))
        assert len(sample) == 20 and set(range(95, 100)) <= set(sample)
        assert len(ledger.sample(500, random.Random(0))) >= 100


class TestScene:
    """Each check reports what it is there for."""

    @pytest.fixture
    def tenant(self):
        return Tenant(Plan("nowhere", "", 0, 1, 1, 1 << 20, SimpleNamespace(value=0)), number=1)

    def test_a_right_draft_is_no_finding(self, tenant):
        document = tenant.write()
        tenant.ledger.published(document.number, begun=0.0)
        tenant.check_probe(document, chain(document.continuation), asked=ledger_module.time.monotonic())
        assert tenant.findings == [] and tenant.counts["found"] == 1

    def test_lost_text(self, tenant):
        document = tenant.write()
        tenant.ledger.published(document.number, begun=0.0)
        tenant.check_probe(document, EMPTY_TREE, asked=ledger_module.time.monotonic())
        (finding,) = tenant.findings
        assert finding.startswith("tenant 1: document 0: was acknowledged and is lost; stored ")

    def test_text_that_should_be_gone(self, tenant):
        document = tenant.write()
        tenant.ledger.withheld(document.number)
        tenant.check_probe(document, chain(document.continuation), asked=ledger_module.time.monotonic())
        (finding,) = tenant.findings
        assert (
            finding
            == "tenant 1: document 0: was flushed, dropped or withheld and is drafted; not to be stored"
        )

    def test_foreign_tokens_unwritten_pairs_and_large_trees(self, tenant):
        tokens = tenant.write().tokens.tolist()
        tenant.check_tree(chain([5]), tokens[0], PROBE_BUDGET, "x")
        assert "another tenant's tokens [5]" in tenant.findings[0]
        tenant.findings.clear()
        tenant.check_tree(chain(tokens[2:4]), tokens[0], PROBE_BUDGET, "x")
        assert "stands in no text" in tenant.findings[0] and len(tenant.findings) == 1
        tenant.check_tree(chain(tokens[1:20]), tokens[0], PROBE_BUDGET, "x")
        assert "deeper than the budget" in tenant.findings[1]

    @pytest.mark.parametrize(
        ("begun", "ended", "found"), [(0, 0, 1), (0, 1, 0), (0, 2, 0), (1, 1, 0), (1, 2, 0), (2, 2, 1)]
    )
    def test_a_service_cancels_only_when_it_is_told_to_stop(self, tenant, begun, ended, found):
        """begun, ended: the service's stops at these moments of a call."""
        tenant.plan.stops.value = ended
        worker, operator = Worker(tenant, 0), Operator(tenant)
        worker._stops = begun
        worker._check_end(Cancelled())
        assert len(tenant.findings) == found

        def call(request, **options):
            tenant.plan.stops.value = ended
            raise Cancelled

        tenant.plan.stops.value = begun
        operator._call(call, None)
        assert len(tenant.findings) == 2 * found

    def test_a_conversation_without_memory(self, tenant):
        document = tenant.write()
        tenant.check_recall(document, EMPTY_TREE, "talk")
        assert tenant.findings == ["tenant 1: talk: the conversation does not remember its text"]
