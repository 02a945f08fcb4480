"""Random operation sequences on an engine and on a model of plain lists, compared after every one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from datastore_service.engine.engine import Engine
from datastore_service.engine.limits import Limits
from datastore_service.engine.live import merge_policy
from datastore_service.engine.segment import build_segment
from datastore_service.protocol.tree import DraftTree, Tier
from datastore_service.protocol.types import Budget, Entry, Opening, Query, Rejected, Reply, Status
from tests.unit.engine.model import EngineModel, Sight, Text

# SPECSTORE_FUZZ=20 tries twenty times as many sequences, each twice as long.
EFFORT = int(os.environ.get("SPECSTORE_FUZZ", "1"))
pytestmark = pytest.mark.timeout(900 * EFFORT)
FRESH_TOKENS = 32  # of a fresh text here, so that sealing and merging happen all the time
WIDE = Budget(nodes=64, depth=8, children=16)
PROBED = 4  # tokens of a context that is looked up in a text known to have it

vocabularies = st.sampled_from((5, 300, 1 << 16, 70_000))  # tokens of 1, 2, 2 and 4 bytes
limits = st.builds(
    Limits,
    sessions=st.sampled_from((2, 5)),
    session_tokens=st.sampled_from((30, 200)),
    tokens=st.sampled_from((60, 400)),
    live_tokens=st.sampled_from((0, 60, 60, 150, 1 << 16)),
    conversations=st.sampled_from((0, 2)),
    conversation_seconds=st.just(100.0),
    refusals=st.sampled_from((0, 3, 100)),
)
names = st.sampled_from("abc")
conversations = st.sampled_from(("", "", "x", "y", "z"))
budgets = st.builds(Budget, st.sampled_from((0, 1, 3, 16, 64)), st.integers(1, 9), st.integers(1, 6))
token_indices = st.lists(st.integers(0, 4), max_size=12)
documents_of_indices = st.lists(st.lists(st.integers(0, 4), max_size=25), max_size=3)


@st.composite
def plans(draw) -> dict:
    """What an entry is to do, in terms of the session as the model knows it by then."""
    return {
        "session": draw(names),
        "back": draw(
            st.sampled_from((0, 0, 0, 1, 3, 40, -1, -7))
        ),  # start: so many tokens before the known end
        "faithful": draw(st.sampled_from((True, True, True, False))),  # repeats what is known as it was
        "new": draw(token_indices),
        "opening": draw(st.sampled_from((True, False, False))),
        "prompt": draw(st.integers(0, 6)),
        "publish": draw(st.sampled_from((True, True, False))),
        "conversation": draw(conversations),
        "closing": draw(st.sampled_from((True, False, False))),
        "withheld": draw(st.sampled_from((True, False, False, False))),
        "budget": draw(budgets),
        "rejected": draw(st.lists(st.integers(0, 4), max_size=2)),
        "queries": draw(st.lists(st.tuples(token_indices, budgets), max_size=2)),
        "ahead": draw(st.booleans()),  # queries begin with what is known beyond the entry
    }


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(merge_policy, "FRESH_TOKENS", FRESH_TOKENS)

    @initialize(vocab_size=vocabularies, limits=limits)
    def begin(self, vocab_size: int, limits: Limits) -> None:
        self.vocab_size = vocab_size
        self.ids = np.array([0, 1, 2, vocab_size // 2, vocab_size - 1], dtype=np.int32)
        self.engine, self.model = Engine(vocab_size, limits=limits), EngineModel(limits)
        self.engine._sessions._conversations._clock = lambda: self.model.now

    def teardown(self) -> None:
        self.patch.undo()

    # What happens

    @rule(plans=st.lists(plans(), min_size=1, max_size=4))
    def step(self, plans: list[dict]) -> None:
        self._step_and_look([self._entry(**plan) for plan in plans])

    @rule(outputs=documents_of_indices)
    def write(self, outputs: list[list[int]]) -> None:
        """Whole sessions, so that the live tier fills."""
        arrays = _arrays([self._text(output) for output in outputs])
        self._step_and_look([Entry("writer", 0, array, opening=Opening(), closing=True) for array in arrays])

    @rule(segments=st.lists(documents_of_indices, max_size=2))
    def set_prior(self, segments: list[list[list[int]]]) -> None:
        texts = [[self._text(document) for document in segment] for segment in segments]
        self.engine.set_prior([build_segment(_arrays(segment), self.vocab_size) for segment in texts])
        self.model.prior = tuple(text for segment in texts for text in segment)

    @rule(documents=documents_of_indices)
    def warmup(self, documents: list[list[int]]) -> None:
        texts = [self._text(document) for document in documents]
        if sum(map(len, texts)) > self.model.limits.live_tokens:
            with pytest.raises(ValueError, match="^documents: .* exceed live_tokens"):
                self.engine.warmup(_arrays(texts))
            return
        self.engine.warmup(_arrays(texts))
        self.model.warmup(texts)
        self._settle()
        self._check_found([text for text in texts if text in self.model.live])

    @rule(tier=st.none() | st.sampled_from(Tier))
    def flush(self, tier: Tier | None) -> None:
        self.engine.flush(tier)
        self.model.flush(tier)

    @rule(session=names)
    def flush_session(self, session: str) -> None:
        self.engine.flush(session=session)
        self.model.flush(None, session)

    @rule()
    def compact(self) -> None:
        self.engine.compact()
        self._settle()

    @rule(seconds=st.sampled_from((1.0, 60.0, 101.0)))
    def time_passes(self, seconds: float) -> None:
        self.model.now += seconds

    # What must hold

    @precondition(lambda self: hasattr(self, "model"))
    @invariant()
    def statistics_are_right(self) -> None:
        stats, model = self.engine.stats(), self.model
        assert (stats.sessions, stats.conversations) == (len(model.sessions), len(model.conversations))
        assert [session.name for session in self.engine.sessions()] == list(model.sessions)
        assert stats.drafts == model.drafts
        assert stats.merge_failures == 0
        tokens = {
            Tier.PRIOR: sum(map(len, model.prior)),
            Tier.LIVE: _live_size(model),
            Tier.SESSION: model.session_tokens + model.conversation_tokens,
            Tier.REJECTED: sum(len(session.refused) for session in model.sessions.values()),
        }
        assert {tier: stats.tiers[tier].tokens for tier in Tier} == tokens
        assert {tier: stats.tiers[tier].hits for tier in Tier} == {tier: model.hits[tier] for tier in Tier}
        assert {t: stats.tiers[t].drafted for t in Tier} == {t: model.drafted[t] for t in Tier}

    def _step_and_look(self, entries: list[Entry]) -> None:
        """What the step has published is found by the next query, whatever runs in the background, and afterwards."""
        before = len(self.model.live)
        self._check_step(entries)
        published = self.model.live[before:]
        if _live_size(self.model) <= self.model.limits.live_tokens:
            self._check_found(published)
        self._settle()
        self._check_found([text for text in published if text in self.model.live])

    def _check_step(self, entries: list[Entry]) -> list[Reply]:
        replies, answers = self.engine.step(entries), self.model.step(entries)
        for entry, reply, answer in zip(entries, replies, answers, strict=True):
            assert (reply.status, reply.known) == (answer.status, answer.known), entry
            _check_tree(reply.tree, answer.sight, entry.budget)
            for query, tree, sight in zip(entry.queries, reply.trees, answer.sights, strict=True):
                _check_tree(tree, sight, query.budget)
                event(f"a query: {'nothing' if not len(tree) else 'something'} drafted")
            event(f"{reply.status.name}, {'nothing' if not len(reply.tree) else 'something'} drafted")
            if reply.status is Status.OK and entry.budget.nodes:
                self.model.count(reply.tree)
        return replies

    def _check_found(self, texts) -> None:
        """Each text is proposed where a context matches it alone."""
        for text in texts:
            for context, following in _unique_places(text, self.model):
                self._check_proposed(context, following)

    def _check_proposed(self, context: Text, following: int) -> None:
        if len(self.model.sessions) == self.model.limits.sessions:
            return
        opening = Opening(publish=False)
        tokens = np.array(context, dtype=np.int32)
        (reply,) = self._check_step([Entry("probe", 0, tokens, budget=WIDE, opening=opening, closing=True)])
        if reply.status is Status.OVER_BUDGET:
            return
        event("a text was looked up by a context that matches it alone")
        assert following in reply.tree.tokens[reply.tree.parents < 0]

    # Helpers

    def _text(self, indices: list[int]) -> Text:
        return tuple(self.ids[indices].tolist())

    def _entry(
        self, session, back, faithful, new, opening, prompt, publish, conversation, closing, withheld, budget, rejected, queries, ahead
    ) -> Entry:  # fmt: skip
        known = self.model.sessions[session].text if session in self.model.sessions else ()
        start = max(0, len(known) - back)
        repeated = known[start : len(known) - ahead] if faithful else known[start:][::-1]
        beyond = known[start + len(repeated) + len(new) :] if ahead else ()
        return Entry(
            session,
            start,
            np.array(repeated + self._text(new), dtype=np.int32),
            rejected=tuple(Rejected(len(known), self.ids[[index]]) for index in rejected),
            budget=budget,
            opening=Opening(conversation, publish, prompt) if opening else None,
            closing=closing,
            withheld=withheld,
            queries=tuple(
                Query(np.array(beyond + self._text(tokens), dtype=np.int32), budget)
                for tokens, budget in queries
            ),
        )

    def _settle(self) -> None:
        """Waits for the live tier's background work and tells the model what it has dropped."""
        self.engine.settle()
        view = self.engine._live.view
        for segment in view.segments:
            segment.check_integrity()
        sealed = (segment.document(i) for segment in view.segments for i in range(segment.documents))
        fresh = (document for index in reversed(view.fresh) for document in index.documents())
        self.model.left(_texts(sealed), _texts(fresh))


def _check_tree(tree: DraftTree, sight: Sight | None, budget: Budget) -> None:
    if sight is None:
        assert len(tree) == 0
        return
    tree.check_integrity(budget.nodes, budget.depth, budget.children)
    for tier, path in _paths(tree):
        assert sight.explains(tier, path), (tier, path, sight)
    assert len(tree) or not sight.goes_on(), sight


def _paths(tree: DraftTree) -> Iterator[tuple[Tier, Text]]:
    """Each node's tier, and the tokens from the root to it."""
    paths: list[Text] = []
    for token, parent, tier in zip(
        tree.tokens.tolist(), tree.parents.tolist(), tree.sources.tolist(), strict=True
    ):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        yield Tier(tier), paths[-1]


def _unique_places(text: Text, model: EngineModel) -> Iterator[tuple[Text, int]]:
    """(context, following token) wherever the last PROBED tokens of the context are nowhere else in any tier."""
    everything = model.live + model.prior
    for end in range(PROBED, len(text)):
        context = text[end - PROBED : end]
        found = sum(
            other[at : at + PROBED] == context
            for other in everything
            for at in range(len(other) - PROBED + 1)
        )
        if found == 1:
            yield context, text[end]


def _live_size(model: EngineModel) -> int:
    """Tokens as the live tier counts them: in fresh text a separator for each document too."""
    return sum(map(len, model.live)) + len(model.fresh)


def _arrays(texts: list[Text]) -> list[np.ndarray]:
    return [np.array(text, dtype=np.int32) for text in texts]


def _texts(documents) -> tuple[Text, ...]:
    return tuple(tuple(document.tolist()) for document in documents if len(document))


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=120 * EFFORT,
    stateful_step_count=40 if EFFORT == 1 else 100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
