"""The request book: one text a request, whether results lag, are read ahead, or are taken back."""

from array import array
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_patches.ledger import requests
from sglang_patches.ledger.requests import ALL_SOURCES, DraftSource, Step, end_tokens, request_opening
from tests.unit.drafting.texts import make_book, make_req, make_tree


def texts(states):
    return [state.text.between(0, len(state.text)).tolist() for state in states]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("lag", [False, True])
def test_the_text_is_that_of_the_request(lag, ahead):
    rng = np.random.default_rng(int(lag))
    req, book = make_req(), make_book()
    assert texts(book.open([req])) == [[1, 2, 3]] and book.open([req]) == []
    text, outcomes = [1, 2, 3], []
    pending = [int(rng.integers(0, 100))]  # the prefill's token
    for _ in range(30):
        text = text + pending
        if not lag:
            req.output_ids.extend(pending)
        tail = pending if lag else []
        states, taken_back = book.read(Step([req], [len(text)], [tail]))
        assert texts(states) == [text] and not taken_back
        outcomes += book.settle(states)
        emitted = rng.integers(0, 100, rng.integers(1, 5)).tolist()
        if ahead:
            states = book.read_ahead(Step([req], [len(text) + len(emitted)], [[*tail, *emitted]]))
            assert texts(states) == [text + emitted]
            outcomes += book.settle(states)
        if lag:
            req.output_ids.extend(pending)
        pending = emitted
    # Every token is in one outcome, in order.
    assert [3 + sum(len(o.tokens) for o in outcomes[:i]) for i in range(len(outcomes))] == [
        o.start for o in outcomes
    ]
    assert np.concatenate([outcome.tokens for outcome in outcomes]).tolist() == text[3:] + (
        emitted if ahead else []
    )
    req.output_ids.extend(pending)
    assert texts([book.close("r")]) == [text + pending]
    assert book.close("r") is None


def test_an_ended_request_has_no_text_beyond_its_end():
    req, book = make_req(), make_book()
    book.open([req])
    book.read(Step([req], [4], [[9]]))
    book.read_ahead(Step([req], [7], [[9, 10, 11, 12]]))
    req.output_ids.extend([9, 10, 11, 12])
    req.finished_len = 2
    assert texts([book.close("r")]) == [[1, 2, 3, 9, 10]]


@pytest.mark.parametrize("again", [[10], [20], [20, 11, 12]])
def test_a_retracted_request_goes_on_with_what_it_draws_again(again):
    """SGLang drops the last step's result of a request that it retracts. Drawn again, its tokens may be others."""
    req, book = make_req(), make_book()
    book.open([req])
    book.settle(book.read(Step([req], [4], [[9]]))[0])
    (state,) = book.read_ahead(Step([req], [5], [[9, 10]]))
    (early,) = book.settle([state])
    assert (early.start, early.tokens.tolist()) == (4, [10])
    req.output_ids.extend([9, *again])
    (state,), taken_back = book.read(Step([req], [4 + len(again)], [[]]))
    assert texts([state]) == [[1, 2, 3, 9, *again]]
    if again == [10]:  # nobody can tell, and nothing differs
        assert not taken_back and book.settle([state]) == []
    else:
        assert taken_back == [state]
        (outcome,) = book.settle([state])
        assert (outcome.start, outcome.tokens.tolist(), len(outcome.tree)) == (4, again, 0)


def test_the_outcome_of_a_verified_tree():
    req, book = make_req(), make_book()
    book.open([req])
    (state,), _ = book.read(Step([req], [4], [[9]]))
    book.settle([state])
    #        root -> 10 -> 12, 13 ; root -> 11
    state.tree = make_tree([10, 11, 12, 13], [-1, -1, 0, 0])
    req.output_ids.extend([9])
    (state,), _ = book.read(Step([req], [7], [[10, 13, 50]]))
    (outcome,) = book.settle([state])
    assert outcome.accepted.tolist() == [True, False, False, True]
    assert (outcome.start, outcome.tokens.tolist()) == (4, [10, 13, 50])
    assert [(r.position, r.tokens.tolist()) for r in outcome.refused] == [(4, [11]), (5, [12])]
    assert len(state.tree) == 0 and book.settle([state]) == []


def test_a_request_that_was_away_settles_its_tree_when_it_is_back():
    """On an accelerator, after others' steps."""
    first, second, book = make_req("r1"), make_req("r2"), make_book()
    book.open([first, second])
    states, _ = book.read(Step([first, second], [4, 4], [[9], [8]]))
    book.settle(states)
    states[0].tree, states[1].tree = make_tree([10, 11], [-1, -1]), make_tree([20], [-1])
    second.output_ids.extend([8])
    (outcome,) = book.settle(book.read(Step([second], [6], [[20, 21]]))[0])
    assert outcome.accepted.tolist() == [True]
    first.output_ids.extend([9, 11])
    second.output_ids.extend([20, 21])
    outcomes = book.settle(book.read(Step([first, second], [6, 7], [[30], [22]]))[0])
    assert [outcome.accepted.tolist() for outcome in outcomes] == [[False, True], []]
    assert [(r.position, r.tokens.tolist()) for r in outcomes[0].refused] == [(4, [10])]


def test_missing_tokens_are_an_error():
    req, book = make_req(), make_book()
    book.open([req])
    for known in (book, make_book()):
        with pytest.raises(RuntimeError, match="request r: tokens [05] to 6 expected, 3 known, 1 pending"):
            known.read(Step([req], [6], [[9]]))


def test_multimodal_hashes_are_no_tokens():
    assert texts(make_book().open([make_req(prompt=(1, 2**40, -5, 3))])) == [[1, 0, 0, 3]]


@pytest.mark.parametrize(
    ("draft", "sources"),
    [
        ({}, ALL_SOURCES),
        ({"draft": None}, ALL_SOURCES),
        ({"draft": True}, ALL_SOURCES),
        ({"draft": ["head", "reference"]}, {DraftSource.HEAD, DraftSource.REFERENCE}),
        ({"draft": ["nobody", ["head"]]}, set()),  # from a caller past the entry
        ({"draft": []}, set()),
        ({"draft": False}, set()),
    ],
    ids=str,
)
def test_a_request_says_what_drafts_for_it(draft, sources):
    (state,) = make_book().open([make_req(custom_params={"specstore": draft})])
    assert {source for source in DraftSource if state.takes_from(source)} == sources
    assert (state.plain_reason, state.most_nodes) == ((None, None) if sources else ("its own wish", 0))


@pytest.mark.parametrize(
    ("given", "named"),
    [(["a", "b"], ("a", "b")), ([], ()), (None, ()), ("a", ()), ([7, "a"], ("a",)), (["a"] * 99, ("a",) * 8)],
    ids=repr,
)
def test_custom_params_name_priors(given, named):
    req = make_req(custom_params={"specstore": {"priors": given}})
    assert request_opening(req, True).priors == named


@pytest.mark.parametrize(("given", "named"), [("p", "p"), (None, ""), (7, "")])
@pytest.mark.parametrize("wish", ["workspace", "group"])
def test_custom_params_name_a_text_that_requests_share(wish, given, named):
    opening = request_opening(make_req(custom_params={"specstore": {wish: given}}), True)
    assert getattr(opening, wish) == named


def test_custom_params_name_conversation_and_forbid_publishing():
    req = make_req(custom_params={"specstore": {"conversation": "c1", "publish": False}})
    (state,) = make_book().open([req])
    assert state.opening.conversation == "c1" and not state.opening.publish


@pytest.mark.parametrize("publish", ["false", 0, "true", [], False])
def test_what_is_not_true_forbids_publishing(publish):
    """A server that answers through no hook of ours hands on what a client wrote."""
    req = make_req(custom_params={"specstore": {"publish": publish}})
    assert not request_opening(req, publish=True).publish


def test_a_null_names_no_conversation():
    """All strangers' conversation was "None"."""
    opening = request_opening(
        make_req(custom_params={"specstore": {"conversation": None, "publish": None}}), True
    )
    assert opening.conversation == "" and opening.publish


def test_what_is_no_object_is_told_of_once(caplog):
    """A client may send any number."""
    requests._report_no_object.cache_clear()
    for number in range(20):
        opening = request_opening(make_req(f"r{number}", custom_params={"specstore": "on"}), True)
        assert opening.conversation == ""
    (record,) = caplog.records
    assert "custom_params.specstore is no object" in record.getMessage()


def test_several_samples_of_one_prompt_have_sessions_of_their_own():
    first, second = make_req("r1"), make_req("r2")
    book = make_book(begun_elsewhere=lambda req: "host:1/7")
    states, _ = book.read(Step([first, second], [4, 4], [[9], [8]]))
    assert [(state.session, state.expected) for state in states] == [("host:1/7", 3), ("r2", 0)]
    assert [state.session for state in book.clear()] == ["host:1/7", "r2"] and len(book) == 0


def test_the_root_is_where_the_kv_ends():
    """Back from retraction a request may hold tokens of a step whose KV is gone."""
    req, book = make_req(), make_book()
    book.open([req])
    req.output_ids.extend([9, 10, 11])
    (state,), _ = book.read(Step([req], [5], [[]]))
    assert texts([state]) == [[1, 2, 3, 9, 10]] and state.text.last == 10


TOKENIZER = SimpleNamespace(eos_token_id=40, additional_stop_token_ids={41})


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("stop_token_ids", [None, [7, 8]])
@pytest.mark.parametrize("eos_token_ids", [None, {2, 3}])
@pytest.mark.parametrize(
    "tokenizer", [None, TOKENIZER, SimpleNamespace(eos_token_id=None, additional_stop_token_ids=None)]
)
def test_the_end_tokens_are_sglang_s(tokenizer, eos_token_ids, stop_token_ids, ignore_eos):
    schedule_batch = pytest.importorskip("sglang.srt.managers.schedule_batch")
    from sglang.srt.sampling.sampling_params import SamplingParams

    wishes = SamplingParams(stop_token_ids=stop_token_ids, ignore_eos=ignore_eos)
    req = schedule_batch.Req("r", "", array("q", [1]), wishes, eos_token_ids=eos_token_ids)
    req.tokenizer = tokenizer
    assert end_tokens(req) == {token for token in range(50) if req._check_token_based_finish([token])}
