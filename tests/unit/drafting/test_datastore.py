"""The datastore's feed: nothing is sent twice, nothing is left out."""

import numpy as np
import pytest

from datastore_service.client import open_datastore
from datastore_service.protocol.tree import EMPTY_TREE, OTHER_TIER, DraftTree, Tier
from datastore_service.protocol.types import NO_DRAFT, Budget, Namespace, Query, Reply, Status
from sglang_patches.drafting.datastore import DatastoreFallback, DatastoreFeed
from sglang_patches.ledger.requests import Step
from sglang_patches.step.acceptance import Acceptance, Learning
from tests.unit.drafting.texts import make_book, make_req, make_tree
from tests.unit.server.service import running
from tests.waiting import eventually

BUDGET = Budget(nodes=4)
LATER = np.full(2, OTHER_TIER, np.uint8)


class Noting:
    """A datastore that notes what it is told."""

    def __init__(self):
        self.entries = []
        self.wants_rejected = True

    def step(self, entries, deadline):
        self.entries += entries
        return [Reply(Status.OK, 0, EMPTY_TREE) for _ in entries]

    def post(self, entries):
        self.entries += entries

    def told(self):
        entries, self.entries = self.entries, []
        return entries


@pytest.fixture
def datastore():
    return Noting()


@pytest.fixture
def feed(datastore):
    return DatastoreFeed(lambda texts: datastore, 0.1)


def test_every_entry_names_the_request_s_tenant(datastore, feed):
    """A session is its tenant's: one that is closed without its tenant would stay open for ever."""
    reqs, book = [make_req("closed"), make_req("dropped")], make_book(tenant="acme")
    feed.open(book.open(reqs))
    states, _ = book.read(Step(reqs, [4, 4], [[9], [9]]))
    feed.step(states, [BUDGET] * 2)
    del reqs[0].output_ids[:]
    states[0].settled = 0  # all that was sent was taken back
    feed.taken_back(states[:1])
    feed.step(states[:1], [BUDGET])
    feed.close([book.close("closed")])
    feed.drop([book.close("dropped")])
    told = datastore.told()
    assert [entry.closing for entry in told] == [False] * 4 + [True, False, True, True]
    assert {entry.tenant for entry in told} == {"acme"}


@pytest.mark.parametrize("silent", [1, 3])
@pytest.mark.parametrize("lag", [False, True])
def test_every_token_is_sent_exactly_once(datastore, feed, lag, silent):
    """silent: one step in so many is told."""
    rng = np.random.default_rng(int(lag))
    req, book = make_req(), make_book()
    feed.open(book.open([req]))
    (opening,) = datastore.told()
    assert opening.opening.prompt_length == 3
    text, sent = [1, 2, 3], opening.tokens.tolist()
    pending = [int(rng.integers(0, 100))]  # the prefill's token
    for number in range(20):
        text += pending
        if not lag:
            req.output_ids.extend(pending)
        states, _ = book.read(Step([req], [len(text)], [pending if lag else []]))
        if number % silent == 0:
            feed.step(states, [BUDGET])
            (entry,) = datastore.told()
            assert entry.start == len(sent) and entry.budget == BUDGET and entry.opening is None
            sent += entry.tokens.tolist()
            assert sent == text
        for known in (0, len(sent) // 2, len(sent)):  # a service that has lost some
            again = feed.told("r", known)
            assert (again.start, again.tokens.tolist(), again.opening is None) == (
                known,
                sent[known:],
                known > 0,
            )
        if lag:
            req.output_ids.extend(pending)
        pending = rng.integers(0, 100, rng.integers(1, 5)).tolist()
    req.output_ids.extend(pending)
    feed.close([book.close("r")])
    (closing,) = datastore.told()
    assert closing.closing and sent + closing.tokens.tolist() == text + pending
    assert feed.told("r", 0) is None


def test_unseen_request_opens_within_the_step(datastore, feed):
    states, _ = make_book().read(Step([make_req()], [4], [[9]]))
    assert feed.has_news(states)
    feed.step(states, [BUDGET])
    (entry,) = datastore.told()
    assert entry.opening is not None and entry.start == 0 and entry.tokens.tolist() == [1, 2, 3, 9]
    assert not feed.has_news(states)


def test_plain_requests_ask_for_no_draft(datastore, feed):
    states, _ = make_book(plain="repetition penalty").read(Step([make_req()], [4], [[9]]))
    DatastoreFallback(feed, BUDGET).parts(states, [EMPTY_TREE])
    assert datastore.told()[0].budget == NO_DRAFT


def test_the_fallback_asks_for_every_request(datastore, feed):
    reqs = [make_req("r1"), make_req("r2")]
    states, _ = make_book().read(Step(reqs, [4, 4], [[9], [8]]))
    DatastoreFallback(feed, BUDGET).parts(states, [EMPTY_TREE] * 2)
    assert [entry.budget for entry in datastore.told()] == [BUDGET, BUDGET]


def settled(book, req):
    """The outcome of a step that accepts 10, 13 of a tree and brings 50; with its state."""
    (state,), _ = book.read(Step([req], [4], [[9]]))
    book.settle([state])
    #        root -> 10 -> 12, 13 ; root -> 11
    state.tree = make_tree([10, 11, 12, 13], [-1, -1, 0, 0])
    (state,) = book.read_ahead(Step([req], [7], [[9, 10, 13, 50]]))
    return book.settle([state]), state


def test_refused_siblings_are_told_once(datastore, feed):
    req, book = make_req(), make_book()
    feed.open(book.open([req]))
    outcomes, state = settled(book, req)
    assert not feed.has_news([state])
    feed.heard(outcomes)
    assert feed.has_news([state])
    datastore.told()
    req.output_ids.extend([9])
    states, _ = book.read(Step([req], [7], [[10, 13, 50]]))
    feed.step(states, [NO_DRAFT])
    (entry,) = datastore.told()
    assert [(r.position, r.tokens.tolist()) for r in entry.rejected] == [(4, [11]), (5, [12])]
    assert (entry.start, entry.tokens.tolist()) == (3, [9, 10, 13, 50])
    assert not feed.has_news(states)


def test_refused_siblings_are_not_told_where_nobody_keeps_them(datastore, feed):
    req, book = make_req(), make_book()
    feed.open(book.open([req]))
    outcomes, state = settled(book, req)
    datastore.wants_rejected = False
    feed.heard(outcomes)
    feed.step([state], [NO_DRAFT])
    assert datastore.told()[-1].rejected == () and not feed.has_news([state])


def test_nothing_is_told_of_a_step_that_was_taken_back(datastore, feed):
    req, book = make_req(), make_book()
    feed.open(book.open([req]))
    outcomes, state = settled(book, req)
    feed.heard(outcomes)
    req.output_ids.extend([9, 77])
    states, taken_back = book.read(Step([req], [5], [[]]))
    feed.taken_back(taken_back)
    feed.step(states, [BUDGET])
    entry = datastore.told()[-1]
    assert (entry.start, entry.tokens.tolist(), entry.rejected) == (3, [9, 77], ())


def test_two_requests_of_one_name_keep_a_session_each(datastore, feed):
    """A client may give its next request the name of one that it has aborted and that still runs."""
    gone, next_one, waiting, book = make_req(), make_req(prompt=(5, 6)), make_req(), make_book()
    for req in (gone, next_one):
        feed.open(book.open([req]))
    for at, token in enumerate((9, 8, 7)):
        step = Step([gone, next_one], [4 + at, 3 + at], [[token], [token + 10]])
        feed.step(book.read(step)[0], [BUDGET] * 2)
        gone.output_ids.append(token)
        next_one.output_ids.append(token + 10)
    assert book.end(waiting) is None, "it never began"
    feed.close([book.close("r")])
    assert next_one.rid == "r" and book.close("r").req is next_one
    said: dict[str, list[int]] = {}
    entries = datastore.told()
    for entry in entries:
        said.setdefault(entry.session, []).extend(entry.tokens.tolist())
    assert sum(entry.opening is not None for entry in entries) == 2
    assert said == {"r": [1, 2, 3, 9, 8, 7], "r#2": [5, 6, 19, 18, 17]}
    assert [entry.session for entry in entries if entry.closing] == ["r"]


def test_of_two_requests_of_one_name_the_finished_one_ends():
    older, newer, book = make_req(), make_req(), make_book()
    book.open([older, newer])
    newer.finished_len = 0
    assert book.close("r").req is newer and book.close("r").req is older and book.close("r") is None


@pytest.mark.parametrize("over_a_stream", [False, True])
def test_an_answer_that_is_said_again_is_published_once(over_a_stream):
    """SGLang drops the output of a request with `input_embeds` when it retracts it."""
    with running() as service:
        endpoint = service.endpoint if over_a_stream else "embedded"
        datastore = open_datastore(endpoint, Namespace("m", "0" * 64), 100)
        feed, book, req, answer = DatastoreFeed(lambda _: datastore, 60.0), make_book(), make_req(), [9, 8, 7]
        feed.open(book.open([req]))
        for dropped in (True, False):
            for at, token in enumerate(answer):
                states, taken_back = book.read(Step([req], [4 + at], [[token]]))
                feed.taken_back(taken_back)
                book.settle(states)
                feed.step(states, [BUDGET])
                req.output_ids.append(token)
            if dropped:
                del req.output_ids[:]
        feed.close([book.close("r")])
        engine = next(iter(service.namespaces)).engine if over_a_stream else datastore._engines[""]
        # A service that was slow to answer the first call knows no session yet when the last entry is sent.
        eventually(lambda: engine.stats().tiers[Tier.LIVE].tokens and engine.stats().sessions == 0)
        assert engine.stats().tiers[Tier.LIVE].tokens == len(answer) + 1, "with its separator"
        datastore.close()


def test_a_session_that_another_instance_began_is_gone_on_with_under_its_name(datastore, feed):
    req, book = make_req(), make_book(begun_elsewhere=lambda req: "host:1/7")
    feed.step(book.read(Step([req], [4], [[9]]))[0], [BUDGET])
    (entry,) = datastore.told()
    assert (entry.session, entry.start, entry.tokens.tolist(), entry.expected) == (
        "host:1/7",
        0,
        [1, 2, 3, 9],
        3,
    )
    assert entry.opening is not None and not entry.opening.handing_over
    req.output_ids.extend([9])
    feed.step(book.read(Step([req], [5], [[8]]))[0], [BUDGET])
    (entry,) = datastore.told()
    assert (entry.session, entry.tokens.tolist(), entry.expected) == ("host:1/7", [8], 0)
    feed.close([book.close("r")])
    assert datastore.told()[0].session == "host:1/7"


def test_all_sessions_are_dropped(datastore, feed):
    book = make_book()
    feed.open(book.open([make_req("r1"), make_req("r2")]))
    datastore.told()
    feed.drop(book.clear())
    assert [(entry.session, entry.closing, len(entry.tokens)) for entry in datastore.told()] == [
        ("r1", True, 0),
        ("r2", True, 0),
    ]


def test_a_request_that_has_ended_is_not_opened_anew(datastore, feed):
    """SGLang launches it once more: it made the batch before it processed the step that ended the request."""
    gone, other, book = make_req("gone"), make_req("other"), make_book()
    feed.open(book.open([gone, other]))
    book.settle(book.read(Step([gone, other], [4, 4], [[9], [8]]))[0])
    gone.output_ids.extend([9])
    gone.finished_len = 1
    feed.close([book.close("gone")])
    datastore.told()
    other.output_ids.extend([8])
    states, _ = book.read(Step([gone, other], [5, 5], [[10], [7]]))
    assert [state.text.last for state in states] == [10, 7]
    assert [outcome.request for outcome in book.settle(states)] == [states[1]]
    assert len(DatastoreFallback(feed, BUDGET).parts(states, [EMPTY_TREE] * 2)) == 2
    assert [entry.session for entry in datastore.told()] == ["other"] and len(book) == 1
    assert [
        outcome.request
        for outcome in book.settle(book.read_ahead(Step([gone, other], [6, 6], [[10, 3], [7, 6]])))
    ] == [states[1]]


def test_the_datastore_drafts_only_for_requests_that_take_its_drafts(datastore, feed):
    """It hears of the others all the same: their outputs are remembered."""
    wishes = (["datastore"], ["draft_model", "head", "reference"])
    reqs = [make_req(str(wish), custom_params={"specstore": {"draft": wish}}) for wish in wishes]
    states, _ = make_book().read(Step(reqs, [4, 4], [[9], [9]]))
    query = Query(np.array([7], np.int32), BUDGET)
    feed.ask(states, [BUDGET] * 2, [(query,)] * 2)
    told = [(len(entry.tokens), entry.budget, entry.queries) for entry in datastore.told()]
    assert told == [(4, BUDGET, (query,)), (4, NO_DRAFT, ())]


def test_a_source_of_a_later_service_is_verified_counted_and_learned_from():
    """A tier that this worker does not know."""
    service = Noting()
    later = DraftTree(
        *(getattr(make_tree([10, 11], [-1, 0]), name) for name in ("tokens", "parents", "probs")), LATER
    )
    service.step = lambda entries, deadline: [Reply(Status.OK, 0, later) for _ in entries]
    feed, acceptance, book, req = (
        DatastoreFeed(lambda texts: service, 0.1),
        Acceptance(),
        make_book(),
        make_req(),
    )
    learning = Learning(acceptance)
    (state,), _ = book.read(Step([req], [4], [[9]]))
    book.settle([state])
    (state.tree,) = feed.step([state], [BUDGET])
    req.output_ids.extend([9])
    outcomes = book.settle(book.read(Step([req], [6], [[10, 50]]))[0])
    learning.heard(outcomes)
    feed.heard(outcomes)
    learning.learn(book)
    told = state.usage.summary(3)
    assert (told["accepted"], told["drafted"]) == ({"other": 1}, {"other": 2})
    assert acceptance.estimate([later], [""]).tolist() != Acceptance().estimate([later], [""]).tolist()
