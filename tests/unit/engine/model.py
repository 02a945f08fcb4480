"""The engine over again, on plain lists: what each entry is answered, and which text a draft may come from.

It knows nothing of indexes, suffix arrays or threads. Where the live tier drops text (how much at a time is the merge
policy's business) it is told what is left and says whether that was allowed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from datastore_service.engine.limits import Limits
from datastore_service.protocol.tree import DraftTree, Tier
from datastore_service.protocol.types import Budget, Entry, Opening, Status

Text = tuple[int, ...]
FEWEST_SAMPLES = 16  # that the engine takes of a token's places, where there are more


@dataclass
class ModelSession:
    """before: the conversation's earlier documents. text: the request's own. refused: (position in it, token) pairs."""

    opening: Opening
    before: list[Text] = field(default_factory=list)
    text: Text = ()
    refused: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        """As the engine counts them: a separator after each earlier document."""
        return sum(len(document) + 1 for document in self.before) + len(self.text)


@dataclass(frozen=True)
class Sight:
    """What a draft may come from. own: the session's text, which goes on with the drafted path."""

    own: Text
    texts: dict[Tier, tuple[Text, ...]]
    refused: tuple[tuple[int, int], ...] = ()

    def explains(self, tier: Tier, path: Text) -> bool:
        """Whether a text of the tier has the path after a token equal to the context's last."""
        if tier is Tier.REJECTED:
            places = [at for at, token in self.refused if (token,) == path]
            return any(at > 0 and self.own[at - 1] == self.own[-1] for at in places)
        endless = [(self.own + path, len(self.own) - 1)] if tier is Tier.SESSION else []
        whole = [(text, len(text) - len(path)) for text in self.texts[tier]]
        return any(_follows(text, self.own[-1], path, last) for text, last in whole + endless)

    def goes_on(self) -> bool:
        """Whether a text has a token after one equal to the context's last, in a tier in which so few texts end with that
        token that a sample of their places cannot consist of ends."""
        tiers = {**self.texts, Tier.SESSION: (*self.texts[Tier.SESSION], self.own)}
        return any(
            any(self.own[-1] in text[:-1] for text in texts)
            and sum(text[-1:] == self.own[-1:] for text in texts) <= FEWEST_SAMPLES
            for texts in tiers.values()
        )


def _follows(text: Text, token: int, path: Text, last: int) -> bool:
    """Whether `path` stands after a `token` in the text, at `last` or before."""
    return any(text[at - 1] == token and text[at : at + len(path)] == path for at in range(1, last + 1))


@dataclass(frozen=True)
class Answer:
    """sight: None where nothing may be drafted. sights: the same of each query."""

    status: Status
    known: int
    sight: Sight | None
    sights: tuple[Sight | None, ...]


class EngineModel:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.now = 0.0
        self.sessions: dict[str, ModelSession] = {}
        self.conversations: OrderedDict[str, tuple[float, ModelSession]] = OrderedDict()
        self.prior: tuple[Text, ...] = ()
        self.sealed: tuple[Text, ...] = ()  # live text in segments, oldest first
        self.fresh: tuple[Text, ...] = ()  # live text that came after it
        self.drafts = 0
        self.hits: Counter[Tier] = Counter()
        self.drafted: Counter[Tier] = Counter()

    @property
    def live(self) -> tuple[Text, ...]:
        return self.sealed + self.fresh

    @property
    def session_tokens(self) -> int:
        return sum(session.tokens for session in self.sessions.values())

    @property
    def conversation_tokens(self) -> int:
        return sum(kept.tokens for _, kept in self.conversations.values())

    # Steps

    def step(self, entries: Sequence[Entry]) -> list[Answer]:
        """A session named twice is answered as if by two steps, which begin at the repetition."""
        answers: list[Answer] = []
        run: list[Entry] = []
        for entry in entries:
            if entry.session in [other.session for other in run]:
                answers += self._step_distinct(run)
                run = []
            run.append(entry)
        return answers + self._step_distinct(run)

    def count(self, tree: DraftTree) -> None:
        """Takes a draft into the statistics."""
        tiers = Counter(map(Tier, tree.sources.tolist()))
        self.drafts += 1
        self.hits.update(tiers.keys())
        self.drafted.update(tiers)

    def _step_distinct(self, entries: list[Entry]) -> list[Answer]:
        """First all open, then all append, then all draft, then all close."""
        opened = [self._find_or_open(entry) for entry in entries]
        statuses = [self._accept(*pair) for pair in zip(entries, opened, strict=True)]
        answers = [self._answer(*each) for each in zip(entries, opened, statuses, strict=True)]
        for entry, session in zip(entries, opened, strict=True):
            if entry.closing and session:
                self._close(entry.session)
        return answers

    def _find_or_open(self, entry: Entry) -> ModelSession | None:
        session, tokens = self.sessions.get(entry.session), tuple(entry.tokens.tolist())
        if entry.opening is None or (session and _agree(session.text[entry.start :], tokens)):
            return session
        self.sessions.pop(entry.session, None)
        if len(self.sessions) >= self.limits.sessions:
            return None
        session = self._taken_up(entry, entry.opening)
        self.sessions[entry.session] = session
        return session

    def _taken_up(self, entry: Entry, opening: Opening) -> ModelSession:
        """A new session, with its conversation's text if that is kept and fits."""
        kept = self._take(opening.conversation) if opening.conversation else None
        if kept is None or kept.tokens + len(entry.tokens) >= self.limits.session_tokens:
            return ModelSession(opening)
        if entry.start == 0 and tuple(entry.tokens[: len(kept.text)].tolist()) == kept.text:
            return ModelSession(opening, kept.before, kept.text)
        return ModelSession(opening, [*kept.before, kept.text])

    def _accept(self, entry: Entry, session: ModelSession | None) -> Status:
        if session is None:
            full = len(self.sessions) >= self.limits.sessions
            return Status.OVER_BUDGET if entry.opening or full else Status.UNKNOWN_SESSION
        if entry.withheld:
            session.opening = replace(session.opening, publish=False)
        if entry.start > len(session.text):
            missing = entry.start + len(entry.tokens) - len(session.text)
            return Status.GAP if self._fits(session, missing) else Status.OVER_BUDGET
        new = tuple(entry.tokens[len(session.text) - entry.start :].tolist())
        if new and not self._fits(session, len(new)):
            return Status.OVER_BUDGET
        session.text += new
        for refused in entry.rejected:
            self._refuse(session, refused.position, refused.tokens.tolist())
        while new and self.session_tokens + self.conversation_tokens > self.limits.tokens:
            self.conversations.popitem(last=False)
        return Status.OK

    def _fits(self, session: ModelSession, more: int) -> bool:
        return (
            session.tokens + more <= self.limits.session_tokens
            and self.session_tokens + more <= self.limits.tokens
        )

    def _refuse(self, session: ModelSession, position: int, tokens: Sequence[int]) -> None:
        last = session.refused[-1][0] if session.refused else -1
        room = self.limits.refusals - len(session.refused)
        if last < position < len(session.text):
            session.refused += tuple((position, token) for token in tokens[: min(2, room)])

    def _answer(self, entry: Entry, session: ModelSession | None, status: Status) -> Answer:
        if session is None or status is not Status.OK:
            return Answer(status, len(session.text) if session else 0, None, (None,) * len(entry.queries))
        sight = self._sight(session, session.text, entry.budget)
        return Answer(status, len(session.text), sight, self._sights(entry, session))

    def _sights(self, entry: Entry, session: ModelSession) -> tuple[Sight | None, ...]:
        """Of a query whose tokens the text has not taken, where it has gone on beyond the entry's: None."""
        end = entry.start + len(entry.tokens)
        beyond = session.text[end:]
        return tuple(
            self._sight(session, session.text[:end] + tokens, query.budget)
            if (tokens := tuple(query.tokens.tolist()))[: len(beyond)] == beyond
            else None
            for query in entry.queries
        )

    def _sight(self, session: ModelSession, text: Text, budget: Budget) -> Sight | None:
        if not budget.nodes or not text:
            return None
        texts = {Tier.SESSION: tuple(session.before), Tier.LIVE: self.live, Tier.PRIOR: self.prior}
        return Sight(text, texts, session.refused)

    def _close(self, name: str) -> None:
        session = self.sessions.pop(name)
        session.refused = ()
        opening = session.opening
        if opening.conversation and session.tokens:
            self._keep(opening.conversation, session)
        output = session.text[opening.prompt_length :]
        if opening.publish and output and self.limits.live_tokens:
            self.fresh += (output,)

    # Conversations

    def _keep(self, name: str, session: ModelSession) -> None:
        self._take(name)
        self.conversations[name] = self.now, session
        self._forget_old()

    def _take(self, name: str) -> ModelSession | None:
        self._forget_old()
        return self.conversations.pop(name, (0.0, None))[1]

    def _forget_old(self) -> None:
        oldest_allowed = self.now - self.limits.conversation_seconds
        while self.conversations and (
            len(self.conversations) > self.limits.conversations
            or next(iter(self.conversations.values()))[0] < oldest_allowed
        ):
            self.conversations.popitem(last=False)

    # What writers do

    def warmup(self, documents: Sequence[Text]) -> None:
        self.sealed += tuple(document for document in documents if document)

    def flush(self, tier: Tier | None, session: str | None = None) -> None:
        if session is not None:
            self.sessions.pop(session, None)
            return
        if tier in (None, Tier.SESSION):
            self.sessions.clear()
            self.conversations.clear()
        if tier in (None, Tier.LIVE):
            self.sealed = self.fresh = ()
        if tier is Tier.PRIOR:
            self.prior = ()
        if tier is Tier.REJECTED:
            for opened in self.sessions.values():
                opened.refused = ()

    def left(self, sealed: tuple[Text, ...], fresh: tuple[Text, ...]) -> None:
        """Takes over what the live tier still has: all of it, or what is newest if it was too much."""
        before, after = self.live, sealed + fresh
        assert after == before[len(before) - len(after) :], "text was lost that is not the oldest, or changed"
        if len(after) < len(before):
            assert _tokens(before) + len(before) > self.limits.live_tokens, "text was dropped without need"
        assert not sealed or _tokens(after) <= self.limits.live_tokens, "text was kept beyond the limit"
        self.sealed, self.fresh = sealed, fresh


def _agree(known: Text, told: Text) -> bool:
    shared = min(len(known), len(told))
    return known[:shared] == told[:shared]


def _tokens(documents: Sequence[Text]) -> int:
    return sum(map(len, documents))
