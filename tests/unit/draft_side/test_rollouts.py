"""What the draft model is run on next."""

import numpy as np

from sglang_patches.draft_side.draft import Candidates, Draft
from sglang_patches.exchange.messages import GREEDY, Sampling
from sglang_patches.exchange.text import Text
from sglang_patches.exchange.trie import Trie
from sglang_patches.methods.saguaro import Rollouts
from tests.support.draft_side import commit

LOOKAHEAD = 3
END = 9
ENDING = Sampling(1.0, 1, 1.0, 0.0, None, frozenset([END]))


def make_draft(sampling=GREEDY):
    return Draft("s", Text(np.zeros(4, np.int32)), sampling, Trie(4))


def run(draft, drafter, only=None):
    """Runs the leaves as the draft side does; returns them."""
    leaves = drafter.leaves(draft)
    for node, _ in leaves:
        if only is None or node in only:
            draft.candidates[node] = Candidates(np.array([node, 7], np.int32), np.array([0.8, 0.1]))
            for grown in drafter.grow(node, draft.candidates[node]):
                draft.trie.add(draft.trie.next_node, *grown)
    return {leaf.node: round(leaf.value, 3) for leaf in leaves}


def test_a_chain_of_the_lookahead_s_length_after_each_start():
    draft, drafter = make_draft(), Rollouts(LOOKAHEAD)
    guesses = [draft.trie.add(node, 0, 50 + node, 0.5) for node in (1, 2)]
    draft.verify([])
    draft.candidates[0] = Candidates(np.array([51], np.int32), np.array([1.0]))
    draft.starts = dict.fromkeys(guesses, 0.5)
    assert run(draft, drafter) == {1: 0.5, 2: 0.5}
    assert run(draft, drafter, only={3}) == {3: 0.4, 4: 0.4}
    assert run(draft, drafter) == {4: 0.4, 5: 0.32}
    assert list(run(draft, drafter).values()) == [0.32]
    assert run(draft, drafter) == {}
    assert len(draft.trie) == 2 * (1 + LOOKAHEAD)


def test_nothing_is_drafted_until_the_outcomes_are_guessed():
    draft, drafter = make_draft(), Rollouts(LOOKAHEAD)
    run(draft, drafter)
    draft.verify([draft.trie.child(0, 0)])
    assert drafter.leaves(draft) == []


def test_after_a_commit_it_drafts_on_from_the_root():
    draft, drafter = make_draft(), Rollouts(LOOKAHEAD)
    for _ in range(2):
        run(draft, drafter)
    commit(draft, [0], 1)
    assert run(draft, drafter) == {2: 0.8}  # one is run already
    commit(draft, [99], 2)
    assert run(draft, drafter) == {0: 1.0}


def test_a_draft_that_nothing_is_worth_running_for_has_no_leaves():
    assert Rollouts(0).leaves(make_draft()) == []


def test_nothing_is_drafted_below_a_token_that_ends_the_request():
    draft, drafter = make_draft(ENDING), Rollouts(LOOKAHEAD)
    draft.candidates[0] = Candidates(np.array([5, END], np.int32), np.array([0.6, 0.3]))
    last, inner = draft.trie.add(1, 0, END, 0.3), draft.trie.add(2, 0, 5, 0.6)
    assert drafter.leaves(draft) == [(inner, 0.6)]
    draft.starts = {last: 0.3, inner: 0.6}
    assert drafter.leaves(draft) == [(inner, 0.6)]
    draft.sampling = GREEDY
    draft.starts = dict(draft.starts)
    assert sorted(drafter.leaves(draft)) == [(last, 0.3), (inner, 0.6)]


def test_a_verification_has_no_ends_where_the_request_is_over():
    """Another drafter may have drafted on."""
    draft = make_draft(ENDING)
    #  root -> 5 -> 6 ; root -> END -> 7
    nodes = [draft.trie.add(*row, 0.5) for row in ((1, 0, 5), (2, 0, END), (3, 2, 7), (4, 1, 6))]
    draft.verify(nodes)
    assert sorted(draft.ends) == [0, 1, 4]
