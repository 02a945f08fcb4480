"""The draft-time benchmark's own parts, on a text small enough for a test."""

import numpy as np

from benchmarks.engine import PROMPT, STEPS, prior_of, publish, replay
from benchmarks.playback import Playback
from datastore_service.engine.engine import Engine
from datastore_service.protocol.tree import DraftTree, Tier
from datastore_service.protocol.types import Budget, Opening


def _documents(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(count)
    phrases = [rng.integers(0, 500, 12, dtype=np.int32) for _ in range(40)]
    return [np.concatenate([phrases[i] for i in rng.integers(0, 40, 60)]) for _ in range(count)]


def test_accepted_follows_the_tree():
    tree = DraftTree(
        np.array([5, 6, 7], np.int32),
        np.array([-1, -1, 1], np.int32),
        np.full(3, 0.5, np.float32),
        np.full(3, 1, np.uint8),
    )
    text = np.array([1, 2, 6, 7, 8, 4], np.int32)
    playback = Playback("s", text, 2, Opening())
    assert playback.accepted(tree).tolist() == [False, True, True]
    assert (playback.follow(tree), playback.known) == (3, 5)
    assert playback.follow(tree) == 1 and playback.ended


def test_a_playback_sends_everything_once():
    text = np.arange(10, dtype=np.int32)
    playback = Playback("s", text, 4, Opening(prompt_length=3))
    first, _ = playback.entry(), playback.advance(5)
    second, closing = playback.entry(Budget(nodes=8)), playback.closing()
    assert [(e.start, e.tokens.tolist()) for e in (first, second, closing)] == [
        (0, [0, 1, 2, 3]), (4, [4, 5, 6, 7, 8]), (9, [9]),
    ]  # fmt: skip
    assert first.opening.prompt_length == 3 and second.opening is None and closing.closing


def test_prior_holds_the_tokens_asked_for():
    documents = _documents(6)
    size = len(documents[0])
    assert len(prior_of(documents, 2 * size, 500)) == 2 * size
    assert len(prior_of(documents, 2 * size + 1, 500)) == 3 * size


def test_replay_times_every_step_and_drafts_from_all_tiers():
    documents = _documents(12)
    assert all(len(document) >= PROMPT + 4 * STEPS for document in documents)
    engine = Engine(500, [prior_of(documents[:4], 1 << 20, 500)])
    publish(engine, documents[4:8])
    nanoseconds, tokens, steps = replay(engine, documents[8:], 2, Budget(nodes=8))
    assert steps == 2 * len(nanoseconds) and all(n > 0 for n in nanoseconds)
    assert tokens > 2 * steps, "phrases repeat, most tokens can be drafted"
    stats = engine.stats()
    assert stats.sessions == 0 and stats.tiers[Tier.LIVE].tokens >= sum(map(len, documents[4:8]))
    assert all(stats.tiers[tier].drafted for tier in (Tier.PRIOR, Tier.LIVE, Tier.SESSION))
