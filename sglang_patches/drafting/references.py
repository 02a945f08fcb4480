"""The references that requests brought along, as a source of drafts beside the others: of both trees one is made, of the nodes that are
likeliest to be accepted.

They are in the worker alone, so that they are never published, and every datastore will do: it hears of them what it hears of all drafts,
the tokens that were refused, which end with their session.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from datastore_service.protocol.tree import DraftTree
from datastore_service.protocol.types import Budget
from sglang_patches.drafting.union import Estimate, Part, unions, united
from sglang_patches.ledger.reference import SEPARATOR, Reference
from sglang_patches.ledger.requests import RequestState


def compile_references(budget: Budget) -> None:
    """Compiles what a step runs, or loads it from Numba's cache, so that no step waits for it."""
    reference = Reference(np.array([0, SEPARATOR], np.int32))
    tree = reference.tree(1)
    reference.follow(np.zeros(1, np.int32))
    unions([[Part(tree)]], [tree], np.ones(1), budget.nodes, budget.children)


def with_references(
    trees: Sequence[DraftTree], states: Sequence[RequestState], estimate: Estimate, budget: Budget
) -> list[DraftTree]:
    """A tree for each request, its reference's nodes among them.

    trees: what other sources propose.
    estimate: of the trees' acceptance.
    budget: of a tree.
    """
    made = list(trees)
    rows = [row for row, state in enumerate(states) if _proposes(state, budget.nodes)]
    parts = [[Part(states[row].predicted), Part(trees[row])] for row in rows]
    best = united(parts, [states[row].tenant for row in rows], estimate, budget)
    for row, tree in zip(rows, best, strict=True):
        made[row] = tree
    return made


def _proposes(state: RequestState, nodes: int) -> bool:
    """Reads on in the request's output, and whether its reference has a proposal."""
    if state.reference is None or state.ended:
        return False
    state.reference.follow(state.text.after(state.opening.prompt_length))
    state.predicted = state.reference.tree(nodes)
    return len(state.predicted) > 0
