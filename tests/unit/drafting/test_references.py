"""References as a source of drafts beside the others."""

import numpy as np

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import Budget
from sglang_patches.drafting.references import compile_references, with_references
from sglang_patches.drafting.union import _unite
from sglang_patches.ledger.reference import _follow
from sglang_patches.ledger.requests import REFERENCE_TOKENS, Step
from sglang_patches.ledger.usage import REFERENCE
from tests.unit.drafting.texts import make_book, make_req

PROMPT = [1, 2, 3]


def by_probability(trees, tenants):
    return np.concatenate([tree.probs for tree in trees])


def state_of(text, output=(), **wishes):
    req = make_req(custom_params={"specstore": wishes, REFERENCE_TOKENS: list(text)})
    (state,) = make_book().open([req])
    state.text.rewrite(len(PROMPT), np.array(output, np.int32))
    return state


def beside(trees, states, nodes=4, children=4):
    return with_references(trees, states, by_probability, Budget(nodes, children=children))


def chain(*tokens, chance=0.5):
    size = len(tokens)
    return DraftTree(
        np.array(tokens, np.int32),
        np.arange(-1, size - 1, dtype=np.int32),
        np.float32(chance) ** np.arange(1, size + 1, dtype=np.float32),
        np.ones(size, np.uint8),
    )


def test_one_tree_of_both_has_the_likeliest_nodes():
    state = state_of(range(10, 40), range(10, 30))
    (tree,) = beside([chain(7, 8)], [state])
    assert tree.tokens.tolist() == [30, 31, 32, 33] and set(tree.sources.tolist()) == {REFERENCE}
    (tree,) = beside([chain(7, 8)], [state], nodes=12)
    tree.check_integrity(nodes=12)
    assert {7, 8, *range(30, 40)} == set(tree.tokens.tolist())
    assert state.predicted.tokens.tolist() == list(range(30, 40))


def test_other_requests_keep_their_trees():
    other, ended = state_of([]), state_of([10, 11])
    ended.ended = True
    trees = [chain(7), chain(8), EMPTY_TREE]
    assert beside(trees[:2], [other, ended]) == trees[:2]
    mixed = beside([*trees, EMPTY_TREE], [other, ended, state_of([10, 11]), state_of([20])])
    assert mixed[:2] == trees[:2] and [tree.tokens.tolist() for tree in mixed[2:]] == [[10, 11], [20]]


def test_a_request_that_plain_steps_must_serve_has_no_reference():
    state = state_of([10, 11], draft=False)
    assert state.plain_reason and state.reference is None and "prediction" not in state.usage.summary(1)


def test_a_request_that_takes_no_drafts_of_its_reference_has_none():
    states = [state_of([10, 11], draft=["datastore"]), state_of([10, 11], draft=["reference"])]
    assert [len(tree) for tree in beside([EMPTY_TREE] * 2, states)] == [0, 2]


def test_only_tokens_of_the_vocabulary_are_drafted():
    (tree,) = beside([EMPTY_TREE], [state_of([10, 100, 11], [10])])  # of `make_book`: 100 tokens
    assert tree is EMPTY_TREE


def test_tokens_that_are_drawn_again_are_followed_anew():
    """SGLang drops the last step's result of a request that it retracts."""
    book, req = make_book(), make_req(custom_params={REFERENCE_TOKENS: list(range(10, 90))})
    book.open([req])
    book.settle(book.read(Step([req], [4], [[10]]))[0])
    (state,) = book.read_ahead(Step([req], [7], [[10, 11, 12, 13]]))
    book.settle([state])
    assert beside([EMPTY_TREE], [state])[0].tokens.tolist() == [14, 15, 16, 17]
    req.output_ids.extend([10, 60, 61, 62])
    (state,), taken_back = book.read(Step([req], [7], [[]]))
    assert taken_back == [state]
    assert beside([EMPTY_TREE], [state])[0].tokens.tolist() == [63, 64, 65, 66]


def test_no_step_waits_for_a_compiler():
    compile_references(Budget(4))
    before = [len(kernel.signatures) for kernel in (_follow, _unite)]
    beside([chain(7)], [state_of(range(10, 40), range(10, 20))])
    assert [len(kernel.signatures) for kernel in (_follow, _unite)] == before != [0, 0]
