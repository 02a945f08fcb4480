"""The open sessions of a namespace: found or opened by name, locked for a step, counted against the limits, closed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from datastore_service.engine.conversations import Conversations, Subjects
from datastore_service.engine.groups import Groups, Sibling
from datastore_service.engine.limits import Limits
from datastore_service.engine.provenance import subjects_of
from datastore_service.engine.session import SessionIndex
from datastore_service.engine.share import NoRoomError, Share
from datastore_service.engine.shared_texts import NO_CHOICE, Choice
from datastore_service.engine.stats import SessionInfo
from datastore_service.protocol.types import EMPTY_TOKENS, Entry, Opening, Status


class OpenSession:
    """An open session in the table.

    index: the session's text.
    choice: the texts that it searches beside those that all sessions search.
    counted: tokens that the table counts for it.
    lock: guards all of this but `counted`, which the table's lock guards.
    earlier: whose text the conversation had before the session.
    sibling: its part in its group, None without one.
    ended: the session is closed, and its index may belong to another session."""

    __slots__ = ("choice", "counted", "earlier", "ended", "index", "lock", "name", "opening", "sibling")

    def __init__(self, name: str, opening: Opening, index: SessionIndex, earlier: Subjects) -> None:
        self.name = name
        self.opening = opening
        chooses = opening.priors or opening.workspace or opening.group
        self.choice = (
            Choice(frozenset(opening.priors), opening.workspace, opening.group) if chooses else NO_CHOICE
        )
        self.sibling: Sibling | None = None
        self.index = index
        self.earlier = earlier
        self.counted = len(index)
        self.ended = False
        self.lock = threading.Lock()

    def shared(self) -> np.ndarray:
        """int32, what its workspace gets: all of its text, nothing without one."""
        return self.index.text().copy() if self.opening.workspace else EMPTY_TOKENS

    def output(self) -> np.ndarray:
        """int32, the tokens after the prompt, if they may be published."""
        opening = self.opening
        return self.index.text()[opening.prompt_length :].copy() if opening.publish else EMPTY_TOKENS


@dataclass(frozen=True, slots=True)
class Usage:
    """What the open sessions and conversations take.

    refused: tokens that the target refused.
    """

    sessions: int
    conversations: int
    tokens: int
    nbytes: int
    refused: int
    refused_nbytes: int


class OpenSessions:
    """The table of open sessions, and the conversations that closed ones have left.

    The table's lock is held for microseconds: no kernel runs under it. Locks are taken in this order: sessions, in order
    of their identity, then the table, then the groups'."""

    def __init__(self, limits: Limits, share: Share, groups: Groups) -> None:
        self._limits, self._share, self._groups = limits, share, groups
        self._lock = threading.Lock()
        self._open: dict[str, OpenSession] = {}
        self._closing: set[OpenSession] = set()  # in steps that go on: their outputs are being published
        self._tokens = 0  # of open sessions
        self._conversations = Conversations(
            limits.conversations, limits.conversation_bytes, limits.conversation_seconds
        )

    def open_of(self, names: set[str]) -> set[str]:
        """Those of the names of which a session is open."""
        with self._lock:
            return names & self._open.keys()

    def acquire(self, entries: Sequence[Entry]) -> tuple[list[OpenSession | None], dict[str, str]]:
        """The entries' sessions, locked; those with an opening are opened. None where a session is unknown or where there
        is no room for one more. Also why not, by the name of the session.

        If another step has closed a session while this call waited for its lock, all are looked up again."""
        while True:
            sessions, refusals = self._find(entries)
            known = [session for session in sessions if session is not None]
            known.sort(key=id)  # one order for all callers: no deadlock
            for session in known:
                session.lock.acquire()
            if not any(session.ended for session in known):
                return sessions, refusals
            self.release(sessions)

    def release(self, sessions: Sequence[OpenSession | None]) -> None:
        """Unlocks the sessions of `acquire`."""
        for session in sessions:
            if session is not None:
                if session.ended:
                    with self._lock:
                        self._closing.discard(session)
                session.lock.release()

    def admit(
        self, entries: Sequence[Entry], sessions: Sequence[OpenSession | None]
    ) -> tuple[list[Status], list[tuple[int, int]]]:
        """Each entry's status, and its new tokens as a range of the step's tokens (see `joined_tokens`), which are counted. A client is
        asked for text that is not here only where there is room for it: else it would send all of it again in each step.
        sessions: of `acquire`."""
        statuses, spans, end = [], [], 0
        with self._lock:
            for entry, session in zip(entries, sessions, strict=True):
                begin, end = end, end + len(entry.tokens)
                status = Status.OK
                if session is not None and entry.withheld:
                    self._withhold(session)
                if session is None:
                    full = entry.opening or not self._may_open()
                    status = Status.OVER_BUDGET if full else Status.UNKNOWN_SESSION
                elif (skipped := session.index.known - entry.start) < 0:
                    fits = self._has_room(session, len(entry.tokens) - skipped)
                    status = Status.GAP if fits else Status.OVER_BUDGET
                else:
                    begin = min(begin + skipped, end)
                    if begin < end and not self._make_room(session, end - begin):
                        status = Status.OVER_BUDGET
                statuses.append(status)
                spans.append((begin, end))
        return statuses, spans

    def close(self, session: OpenSession) -> bool:
        """Ends a session, whose lock the caller holds, and keeps its conversation and its output for its group. False if it was flushed
        during the step, and its text with it."""
        with self._lock:
            if self._open.get(session.name) is not session:
                return False
            self._remove(session, keeps_text=True)
            session.ended = True
            self._closing.add(session)
            session.index.forget_drafting()
            if session.opening.conversation and len(session.index):
                subjects = session.earlier | subjects_of(session.opening)
                self._conversations.keep(session.opening.conversation, session.index, subjects)
        return True

    def flush(self, name: str) -> None:
        """Forgets a session; an unknown name is no error."""
        with self._lock:
            if name in self._open:
                self._remove(self._open[name])

    def clear(self) -> None:
        """Forgets all sessions and conversations."""
        with self._lock:
            for session in list(self._open.values()):
                self._remove(session)
            self._conversations.clear()

    def forget(self, subjects: Subjects) -> None:
        """Forgets what conversations have of the subjects. Their open sessions go on and leave nothing when they end; one that has only
        begun with their text is unknown afterwards. On return no step publishes what such a session has written."""
        with self._lock:
            self._conversations.forget(subjects)
            for session in list(self._open.values()):
                if subjects_of(session.opening) & subjects:
                    session.opening = replace(session.opening, conversation="")
                    self._withhold(session)
                elif session.earlier & subjects:
                    self._remove(session)
            under_way = [*self._open.values(), *self._closing]
        for session in under_way:
            with session.lock:  # its step has seen the opening as it was
                pass

    def forget_refused(self) -> None:
        """Forgets what the target refused."""
        for session in self._all():
            with session.lock:
                if not session.ended:
                    session.index.forget_refused()

    def infos(self) -> list[SessionInfo]:
        """Oldest first."""
        return [
            SessionInfo(
                session.name, len(session.index), session.opening.prompt_length,
                session.index.nbytes + session.index.refused_nbytes, session.opening.conversation, session.opening.publish,
            )
            for session in self._all()
        ]  # fmt: skip

    def usage(self) -> Usage:
        with self._lock:
            sessions, kept = list(self._open.values()), self._conversations
            conversations, tokens, nbytes = len(kept), self._tokens + kept.tokens, kept.nbytes
        return Usage(
            len(sessions),
            conversations,
            tokens,
            nbytes + sum(session.index.nbytes for session in sessions),
            sum(len(session.index.refused) for session in sessions),
            sum(session.index.refused_nbytes for session in sessions),
        )

    def _all(self) -> list[OpenSession]:
        with self._lock:
            return list(self._open.values())

    def _find(self, entries: Sequence[Entry]) -> tuple[list[OpenSession | None], dict[str, str]]:
        refusals: dict[str, str] = {}
        with self._lock:
            known = self._open
            found = [
                known.get(entry.session)
                if entry.opening is None
                else self._find_or_open(entry, entry.opening, refusals)
                for entry in entries
            ]
        return found, refusals

    def _find_or_open(self, entry: Entry, opening: Opening, refusals: dict[str, str]) -> OpenSession | None:
        """The session that the entry opens, None if there is no room: then `refusals` gets the reason. Called under the table's lock."""
        session = self._open.get(entry.session)
        if session and _continues(session.index, entry):
            return session
        if session:
            self._remove(session)
        try:
            return self._opened(entry, opening)
        except NoRoomError as error:
            refusals[entry.session] = str(error)
            return None

    def _opened(self, entry: Entry, opening: Opening) -> OpenSession:
        """A new session. Raises NoRoomError."""
        if self._is_full:
            raise NoRoomError(f"sessions: {len(self._open)} are open in the namespace, its limit")
        self._share.open_session()
        session = OpenSession(entry.session, opening, *self._begun_with(entry, opening))
        if opening.group:
            session.sibling = self._groups.join(opening.group, session.index.address, opening.prompt_length)
        self._open[entry.session] = session
        self._tokens += session.counted
        return session

    @property
    def _is_full(self) -> bool:
        return len(self._open) >= self._limits.sessions

    def _may_open(self) -> bool:
        """Whether there is room for one more session."""
        return not self._is_full and self._share.may_open_session()

    def _begun_with(self, entry: Entry, opening: Opening) -> tuple[SessionIndex, Subjects]:
        """The index of the session's conversation and whose text it has, or an empty one."""
        kept = self._conversations.take(opening.conversation) if opening.conversation else None
        if kept is None or len(kept[0]) + len(entry.tokens) >= self._limits.session_tokens:
            return SessionIndex(), frozenset()
        if not _begins_with(entry, kept[0].text()):
            kept[0].begin_document()
        return kept

    def _make_room(self, session: OpenSession, extra: int) -> bool:
        """Counts `extra` tokens of a session and drops conversations for them; False if there is no room. Called under the
        table's lock."""
        if not self._has_room(session, extra):
            return False
        if self._open.get(session.name) is not session:
            return True  # flushed since it was found: it lives until this step ends and is no longer counted
        session.counted += extra
        self._tokens += extra
        while self._tokens + self._conversations.tokens > self._limits.tokens:
            self._conversations.drop_oldest()
        return True

    def _has_room(self, session: OpenSession, extra: int) -> bool:
        """Whether a session may have `extra` tokens more. Called under the table's lock."""
        counted = self._open.get(session.name) is session
        return len(session.index) + extra <= self._limits.session_tokens and (
            not counted or self._tokens + extra <= self._limits.tokens
        )

    def _withhold(self, session: OpenSession) -> None:
        """Has a session leave nothing for others but its conversation. Called under the table's lock."""
        session.opening = replace(session.opening, publish=False, workspace="", group="")
        self._leave_group(session, keeps_text=False)

    def _remove(self, session: OpenSession, keeps_text: bool = False) -> None:
        """Takes a session off the table. keeps_text: what it has written stays for its group."""
        del self._open[session.name]
        self._share.end_sessions(1)
        self._tokens -= session.counted
        self._leave_group(session, keeps_text)

    def _leave_group(self, session: OpenSession, keeps_text: bool) -> None:
        if session.sibling is not None:
            self._groups.leave(session.sibling, keeps_text=keeps_text)
            session.sibling = None


def _continues(index: SessionIndex, entry: Entry) -> bool:
    """Whether an opening of an open session's name repeats or extends its text (a reply was lost). If not, it begins a new
    text."""
    known = index.text()[entry.start :]
    shared = min(len(known), len(entry.tokens))
    return bool(np.array_equal(known[:shared], entry.tokens[:shared]))


def _begins_with(entry: Entry, text: np.ndarray) -> bool:
    return (
        entry.start == 0
        and len(entry.tokens) >= len(text)
        and np.array_equal(entry.tokens[: len(text)], text)
    )
