"""The request tracker: nothing is sent twice, nothing is left out, whether results lag or not."""

from array import array
from types import SimpleNamespace

import numpy as np
import pytest

from datastore_service.protocol.tree import DraftTree
from datastore_service.protocol.types import NO_DRAFT, Budget
from sglang_patches.workers.requests import RequestTracker

BUDGET = Budget(nodes=4)


def _make_req(rid="r", prompt=(1, 2, 3), custom_params=None):
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=array("q", prompt),
        output_ids=array("q"),
        finished_len=None,
        sampling_params=SimpleNamespace(custom_params=custom_params),
    )


def _make_tracker(outcomes=None, plain=None):
    record = (
        (lambda probs, sources, on_path: outcomes.append(on_path.tolist()))
        if outcomes is not None
        else lambda *_: None
    )
    return RequestTracker(100, True, lambda req: plain, record)


def _make_tree(tokens, parents):
    size = len(tokens)
    return DraftTree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.full(size, 0.5, np.float32),
        np.full(size, 3, np.uint8),
    )


@pytest.mark.parametrize("lag", [False, True])
def test_every_token_is_sent_exactly_once(lag):
    rng = np.random.default_rng(int(lag))
    req, tracker = _make_req(), _make_tracker()
    (opening,) = tracker.opening_entries([req])
    assert opening.opening.prompt_length == 3
    text, sent = [1, 2, 3], opening.tokens.tolist()
    pending = [int(rng.integers(0, 100))]  # the prefill's token
    for _ in range(20):
        text += pending
        if not lag:
            req.output_ids.extend(pending)
        (entry,), roots = tracker.step_entries([req], [len(text)], [pending if lag else []], BUDGET)
        assert entry.start == len(sent) and roots.tolist() == [text[-1]]
        sent += entry.tokens.tolist()
        assert sent == text
        if lag:
            req.output_ids.extend(pending)
        pending = rng.integers(0, 100, rng.integers(1, 5)).tolist()
    req.output_ids.extend(pending)
    closing = tracker.closing_entry("r")
    assert closing.closing and sent + closing.tokens.tolist() == text + pending
    assert tracker.closing_entry("r") is None


def test_a_silent_step_leaves_its_tokens_to_the_next_entry():
    req, tracker = _make_req(), _make_tracker()
    tracker.opening_entries([req])
    assert tracker.roots([req], [4], [[9]]).tolist() == [9]
    req.output_ids.append(9)
    assert tracker.roots([req], [5], [[8]]).tolist() == [8]
    (entry,), roots = tracker.step_entries([req], [6], [[8, 7]], BUDGET)
    assert entry.start == 3 and entry.tokens.tolist() == [9, 8, 7] and roots.tolist() == [7]


def test_unseen_request_opens_within_the_step():
    req, tracker = _make_req(), _make_tracker()
    (entry,), _ = tracker.step_entries([req], [4], [[9]], BUDGET)
    assert entry.opening is not None and entry.start == 0 and entry.tokens.tolist() == [1, 2, 3, 9]


def test_plain_requests_ask_for_no_draft():
    req, tracker = _make_req(), _make_tracker(plain="repetition penalty")
    tracker.opening_entries([req])
    (entry,), _ = tracker.step_entries([req], [4], [[9]], BUDGET)
    assert entry.budget == NO_DRAFT


def test_missing_tokens_are_an_error():
    tracker = _make_tracker()
    with pytest.raises(RuntimeError, match="request r: 6 tokens expected, 3 known, 1 pending"):
        tracker.step_entries([_make_req()], [6], [[9]], BUDGET)


def test_custom_params_name_conversation_and_forbid_publishing():
    req = _make_req(custom_params={"specstore": {"conversation": "c1", "publish": False}})
    (entry,) = _make_tracker().opening_entries([req])
    assert entry.opening.conversation == "c1" and not entry.opening.publish


def test_multimodal_hashes_are_not_sent_as_tokens():
    (entry,) = _make_tracker().opening_entries([_make_req(prompt=(1, 2**40, -5, 3))])
    assert entry.tokens.tolist() == [1, 0, 0, 3]


def test_outcome_of_the_last_tree_is_learned_and_its_siblings_reported():
    outcomes = []
    req, tracker = _make_req(), _make_tracker(outcomes)
    tracker.opening_entries([req])
    tracker.step_entries([req], [4], [[9]], BUDGET)
    #        root -> 10 -> 12, 13 ; root -> 11
    tracker.note_drafted([req], [_make_tree([10, 11, 12, 13], [-1, -1, 0, 0])])
    assert tracker.has_news([req])
    req.output_ids.extend([9])
    (entry,), _ = tracker.step_entries([req], [7], [[10, 13, 50]], BUDGET)
    assert outcomes == [] and not tracker.has_news([req])
    tracker.learn()
    tracker.learn()
    assert outcomes == [[True, False, False, True]]
    assert [(r.position, r.tokens.tolist()) for r in entry.rejected] == [(4, [11]), (5, [12])]


def test_a_request_that_was_away_settles_its_tree_when_it_is_back():
    """Retracted after a step, say: others' steps come in between, and its text goes on where it was."""
    first, second, outcomes = _make_req("r1"), _make_req("r2"), []
    tracker = _make_tracker(outcomes)
    tracker.opening_entries([first, second])
    tracker.step_entries([first, second], [4, 4], [[9], [8]], BUDGET)
    tracker.note_drafted([first, second], [_make_tree([10, 11], [-1, -1]), _make_tree([20], [-1])])
    second.output_ids.extend([8])
    (entry,), _ = tracker.step_entries([second], [6], [[20, 21]], BUDGET)
    assert not entry.rejected and tracker.has_news([first])
    tracker.learn()
    first.output_ids.extend([9, 11])
    second.output_ids.extend([20, 21])
    (entry, other), roots = tracker.step_entries([first, second], [6, 7], [[30], [22]], BUDGET)
    tracker.learn()
    assert outcomes == [[True], [False, True]] and roots.tolist() == [30, 22]
    assert (entry.start, entry.tokens.tolist(), other.tokens.tolist()) == (4, [11, 30], [22])
    assert [(r.position, r.tokens.tolist()) for r in entry.rejected] == [(4, [10])] and not other.rejected


def _make_split_tracker():
    return RequestTracker(100, True, lambda req: None, lambda *_: None, lambda req: "host:1/7")


def test_a_session_that_another_instance_began_is_gone_on_with_under_its_name():
    req, tracker = _make_req(), _make_split_tracker()
    assert tracker.has_news([req])
    (entry,), _ = tracker.step_entries([req], [4], [[9]], BUDGET)
    assert (entry.session, entry.start, entry.tokens.tolist(), entry.expected) == (
        "host:1/7",
        0,
        [1, 2, 3, 9],
        3,
    )
    assert entry.opening is not None and not entry.opening.handing_over
    assert not tracker.has_news([req])
    req.output_ids.extend([9])
    (entry,), _ = tracker.step_entries([req], [5], [[8]], BUDGET)
    assert (entry.session, entry.tokens.tolist(), entry.expected) == ("host:1/7", [8], 0)
    assert tracker.closing_entry("r").session == "host:1/7"


def test_several_samples_of_one_prompt_have_sessions_of_their_own():
    first, second, tracker = _make_req("r1"), _make_req("r2"), _make_split_tracker()
    entries, _ = tracker.step_entries([first, second], [4, 4], [[9], [8]], BUDGET)
    assert [(entry.session, entry.expected) for entry in entries] == [("host:1/7", 3), ("r2", 0)]
    assert sorted(tracker.clear()) == ["host:1/7", "r2"]
