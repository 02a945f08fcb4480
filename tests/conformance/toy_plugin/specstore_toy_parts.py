"""The parts of the toy methods. Imported when a worker is made: SGLang's metrics have to be set up before `prometheus_client` is imported."""

from __future__ import annotations

import dataclasses
import random
from unittest import mock

import numpy as np

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree, Tier
from sglang_patches.drafting.datastore import DatastoreFallback
from sglang_patches.drafting.union import Part, first_trees
from sglang_patches.methods.registry import Parts, Surroundings
from sglang_patches.verification import noise_verifier
from sglang_patches.verification.noise_verifier import SharedNoise
from sglang_patches.verification.shared_noise import draw
from sglang_patches.verification.verifier import HostTrees, TargetDraws
from tests.support.draft_side import InProcessDraftSide, follow_pairs

ACCEPT_ANYWAY, ACCEPT_SOME = 0.8, 0.1
NOISE_SCALE = 0.9


def chains(around: Surroundings) -> Parts:
    """Asks the datastore for the likeliest continuation alone."""
    return Parts(DatastoreFallback(around.datastore, dataclasses.replace(around.budget, children=1)))


def drafted(around: Surroundings) -> Parts:
    """Drafts beside the target with a model of the session's own token pairs, and falls back to the datastore."""
    return dataclasses.replace(chains(around), channel=InProcessDraftSide(follow_pairs))


def leaking(around: Surroundings) -> Parts:
    """Drafts from what everybody has written."""
    everybody = WrongTenant(around)
    return Parts(everybody)


class WrongTenant(DatastoreFallback):
    """Proposes what any worker of this process has been told, whoever its tenant is."""

    _texts: list[list[int]] = []

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around.datastore, around.budget)
        self._nodes = around.budget.nodes

    def parts(self, states, found):
        own = first_trees(super().parts(states, found))
        copied = [
            tree if len(tree) else self._copied(state.text.last)
            for state, tree in zip(states, own, strict=True)
        ]
        self._texts += [state.text.between(0, len(state.text)).tolist() for state in states]
        return [[Part(tree)] for tree in copied]

    def _copied(self, last: int) -> DraftTree:
        for text in self._texts:
            if last in text[:-1]:
                return chain_of(text[text.index(last) + 1 :][: self._nodes])
        return EMPTY_TREE


def chain_of(tokens: list[int]) -> DraftTree:
    size = len(tokens)
    return DraftTree(
        np.array(tokens, np.int32),
        np.arange(-1, size - 1, dtype=np.int32),
        np.linspace(0.9, 0.5, size, dtype=np.float32),
        np.full(size, Tier.LIVE, np.uint8),
    )


class Biased(TargetDraws):
    """Often accepts a drafted child although the target drew another token."""

    _draw = random.Random(1)

    def verify(self, *arguments, **named):
        exact = HostTrees.child_with_token

        def child(trees: HostTrees, request: int, node: int, token: int) -> int:
            first = next(iter(trees.children(request, node)), -1)
            anyway = first != -1 and self._draw.random() < ACCEPT_ANYWAY
            return first if anyway else exact(trees, request, node, token)

        with mock.patch.object(HostTrees, "child_with_token", child):
            return super().verify(*arguments, **named)


class Cooled(SharedNoise):
    """Draws with noise that is a little too small."""

    def verify(self, *arguments, **named):
        def cooled(probabilities, seeds, positions):  # argmax(log p + SCALE g) = argmax(log p / SCALE + g)
            return draw(probabilities ** (1 / NOISE_SCALE), seeds, positions)

        with mock.patch.object(noise_verifier, "draw", cooled):
            return super().verify(*arguments, **named)


class Eager(SharedNoise):
    """Takes a drafted token for the target's own with a small chance."""

    def verify(self, verify_input, layout, *arguments, **named):
        self._trees = HostTrees.of(layout)
        return super().verify(verify_input, layout, *arguments, **named)

    def _target(self, *arguments):
        target = super()._target(*arguments)
        exact, trees, chance = target.sample, self._trees, random.Random(1)

        def sample(nodes):
            tokens = exact(nodes)
            for at, node in enumerate(nodes):
                child = next(trees.children(node.request, trees.rows[node.request].index(node.row)), None)
                if child is not None and chance.random() < ACCEPT_SOME:
                    tokens[at] = trees.tokens[node.request][child]
            return tokens

        target.sample = sample
        return target
