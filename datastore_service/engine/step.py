"""One step: a batch of entries is appended to its sessions, drafted for and answered in one kernel call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from datastore_service.engine.kernel_call import KernelCall, KernelCallPool
from datastore_service.engine.open_sessions import OpenSession, OpenSessions
from datastore_service.engine.session import SessionIndex
from datastore_service.engine.share import NoRoomError
from datastore_service.engine.shared_texts import NO_CHOICE, SharedTexts, Texts
from datastore_service.protocol.types import EMPTY_TOKENS, Entry, Opening, Query, Reply, Status


class StepRunner:
    """Runs steps over the sessions and texts of one namespace, in any thread.

    weights: of `FusionWeights.packed`. refusals: refused tokens kept of a session. publish: adds a closed session's
    output, int32, with its opening to the live tier; False if that cannot be stored; raises NoRoomError."""

    def __init__(
        self,
        sessions: OpenSessions,
        texts: SharedTexts,
        calls: KernelCallPool,
        weights: np.ndarray,
        refusals: int,
        publish: Callable[[np.ndarray, Opening], bool],
    ) -> None:
        self._sessions, self._texts, self._calls = sessions, texts, calls
        self._weights, self._refusals, self._publish = weights, refusals, publish

    def run(self, entries: Sequence[Entry], queries: int, tokens: np.ndarray) -> list[Reply]:
        """One Reply for each Entry, in the same order. entries: of distinct sessions. queries: 0 if they have none.
        tokens: of `joined_tokens`."""
        sessions, refusals = self._sessions.acquire(entries)
        try:
            replies = self._draft(entries, sessions, queries, tokens)
            for row, entry in enumerate(entries):
                session = sessions[row]
                if session is None:
                    replies[row].refusal = refusals.get(entry.session, "")
                elif entry.closing and (failure := self._close(session)):
                    status, refusal = failure
                    replies[row] = replace(replies[row], status=status, known=0, refusal=refusal)
        finally:
            self._sessions.release(sessions)
        return replies

    def _searched(self, entries: Sequence[Entry], sessions: Sequence[OpenSession | None]) -> Sequence[Texts]:
        """What each entry's session searches."""
        choices = [NO_CHOICE if session is None else session.choice for session in sessions]
        if choices.count(NO_CHOICE) == len(choices):
            return [self._texts.current] * len(choices)
        for entry in entries:
            if entry.opening is not None:
                self._texts.note_opening(entry.opening)
        found = {choice: self._texts.chosen(choice) for choice in {*choices}}
        return [found[choice] for choice in choices]

    def _draft(
        self,
        entries: Sequence[Entry],
        sessions: Sequence[OpenSession | None],
        queries: int,
        tokens: np.ndarray,
    ) -> list[Reply]:
        """Appends the entries' tokens, drafts and answers queries, in one kernel call."""
        # Kept alive until the kernel returns: tables have only addresses.
        texts = self._searched(entries, sessions)
        statuses, spans = self._sessions.admit(entries, sessions)
        call = self._calls.take()
        call.begin()
        for entry, session, status, (begin, end), of in zip(
            entries, sessions, statuses, spans, texts, strict=True
        ):
            if session is None or status is not Status.OK:
                call.add_nothing()
                continue
            index, budget = session.index, entry.budget
            index.reserve(end - begin, budget.nodes, _longest(entry.queries) if entry.queries else 0)
            if entry.rejected and self._refusals:
                self._note_refused(entry, index, end - begin)
            call.search(of.table)
            call.add(index, begin, end, budget)
        if queries:
            _add_queries(call, entries, sessions, statuses, texts)
        trees = call.run(len(entries), tokens, self._weights)
        self._calls.give_back(call)
        replies = [
            Reply(status, 0 if session is None else session.index.known, tree)
            for session, status, tree in zip(sessions, statuses, trees, strict=False)
        ]
        if queries:
            answers = iter(trees[len(entries) :])
            for entry, reply in zip(entries, replies, strict=True):
                reply.trees = tuple(islice(answers, len(entry.queries)))
        for session in sessions:
            if session is not None and session.sibling is not None:
                self._texts.groups.write(session.sibling, session.index.text())
        return replies

    def _note_refused(self, entry: Entry, index: SessionIndex, new: int) -> None:
        """Notes the tokens that the target refused. A refusal beyond the new tokens is dropped: it is of text that the session does not
        have.

        new: tokens that the entry adds."""
        for refused in entry.rejected:
            if refused.position < index.known + new:
                index.refuse(refused.position, refused.tokens, self._refusals)

    def _close(self, session: OpenSession) -> tuple[Status, str] | None:
        """Ends a session, publishes its output and adds its text to its workspace, as far as they may be. None, or the status and the
        refusal that say why it is not published."""
        output, shared = session.output(), session.shared()
        if not self._sessions.close(session):
            return Status.UNKNOWN_SESSION, ""
        if len(shared):
            self._texts.workspaces.add(session.opening.workspace, shared)
        try:
            return None if self._publish(output, session.opening) else (Status.OVER_BUDGET, "")
        except NoRoomError as error:
            return Status.OVER_BUDGET, str(error)


def _add_queries(
    call: KernelCall,
    entries: Sequence[Entry],
    sessions: Sequence[OpenSession | None],
    statuses: Sequence[Status],
    texts: Sequence[Texts],
) -> None:
    """Adds the queries. Their tokens follow those of all entries (see `joined_tokens`)."""
    end = sum(len(entry.tokens) for entry in entries)
    for entry, session, status, of in zip(entries, sessions, statuses, texts, strict=True):
        committed = EMPTY_TOKENS
        call.search(of.table)
        if entry.queries and session is not None:
            committed = session.index.text()[entry.start + len(entry.tokens) :]
        for query in entry.queries:
            begin, end = end, end + len(query.tokens)
            if session is None or status is not Status.OK or not _agrees(query.tokens, committed):
                call.add_nothing()
            else:
                call.add(session.index, begin + len(committed), end, query.budget)


def _longest(queries: Sequence[Query]) -> int:
    return max(len(query.tokens) for query in queries)


def _agrees(tokens: np.ndarray, committed: np.ndarray) -> bool:
    """Whether a query's tokens begin with the text that the session has beyond the entry's."""
    return len(committed) == 0 or np.array_equal(tokens[: len(committed)], committed)
