"""What the drafter knows of the running requests: which tokens the datastore has, what was drafted last.

Under overlap scheduling the last step's tokens are not yet in the request; they are pending (the worker reads them
from the batch's relay). A request's true length follows from its cached KV, which holds all tokens but the last one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import NO_DRAFT, Budget, Entry, Opening, Rejected
from sglang_patches.workers.outcomes import settle

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

# Sessions of requests that vanished, neither finished nor aborted, are closed after this time.
UNSEEN_SECONDS = 600.0


@dataclass(slots=True)
class RequestState:
    """sent: tokens the datastore was told of. expected: those it has been told by another instance. tree: verified in the
    last step, drafted when `length` tokens existed."""

    req: Req
    session: str
    opening: Opening
    plain_reason: str | None
    expected: int
    sent: int = 0
    length: int = 0
    tree: DraftTree = EMPTY_TREE
    last_seen: float = 0.0


def request_opening(req: Req, publish: bool) -> Opening:
    """Reads `custom_params["specstore"]`: {"conversation": name, "publish": bool}."""
    wishes = (req.sampling_params.custom_params or {}).get("specstore") or {}
    if not isinstance(wishes, dict):
        logger.warning("specstore: custom_params.specstore of %s is not an object, ignored", req.rid)
        wishes = {}
    return Opening(
        conversation=str(wishes.get("conversation", "")),
        publish=publish and bool(wishes.get("publish", True)),
        prompt_length=len(req.origin_input_ids),
    )


def in_vocabulary(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """int32; multimodal prompts hold hash values in place of image tokens, which become 0."""
    ids = np.array(tokens, dtype=np.int64)
    return np.where((ids >= 0) & (ids < vocab_size), ids, 0).astype(np.int32)


class RequestTracker:
    """One per worker; keyed by request id, which is also the session's name unless another instance has begun it."""

    def __init__(
        self,
        vocab_size: int,
        publish: bool,
        needs_plain_step: Callable[[Req], str | None],
        on_outcome: Callable[[np.ndarray, np.ndarray, np.ndarray], None],
        begun_elsewhere: Callable[[Req], str | None] = lambda req: None,
    ) -> None:
        """on_outcome: called by `learn` with the verified nodes' probs and sources and which of them were on the accepted path.
        begun_elsewhere: name of the session that another instance has begun with the request's prompt, None if none has."""
        self._vocab_size = vocab_size
        self._publish = publish
        self._needs_plain_step = needs_plain_step
        self._on_outcome = on_outcome
        self._begun_elsewhere = begun_elsewhere
        self._states: dict[str, RequestState] = {}
        self._outcome: tuple[list[DraftTree], np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._states)

    def opening_entries(self, reqs: Iterable[Req]) -> list[Entry]:
        """Entries that send the prompts of requests not seen before."""
        return [self._open(req) for req in reqs if req.rid not in self._states]

    def _open(self, req: Req) -> Entry:
        opening = request_opening(req, self._publish)
        begun = self._begun_elsewhere(req)
        if begun and any(state.session == begun for state in self._states.values()):
            begun = None  # several samples of one prompt
        state = RequestState(
            req,
            begun or req.rid,
            opening,
            self._needs_plain_step(req),
            expected=opening.prompt_length if begun else 0,
            last_seen=time.monotonic(),
        )
        self._states[req.rid] = state
        prompt = self._tokens(req, 0, opening.prompt_length, ())
        state.sent = opening.prompt_length
        return Entry(state.session, 0, prompt, opening=opening)

    def step_entries(
        self, reqs: Sequence[Req], lengths: Sequence[int], pending: Sequence[Sequence[int]], budget: Budget
    ) -> tuple[list[Entry], np.ndarray]:
        """Entries of a decode step and the last accepted token of each request (int64 [batch]).

        lengths: true token counts. pending: each request's accepted tokens that are not yet in its output.
        """
        openings = {req.rid: self._reopen(req) for req in reqs if req.rid not in self._states}
        states = [self._states[req.rid] for req in reqs]
        begins = [
            min(state.length if len(state.tree) else state.sent, length - 1)
            for state, length in zip(states, lengths, strict=True)
        ]
        tokens, ends = self._joined(reqs, begins, lengths, pending)
        rejected = self._settle(states, tokens, ends, lengths)
        entries = [
            Entry(
                state.session,
                state.sent,
                tokens[min(end, end - length + state.sent) : end],
                rejected=refused,
                budget=NO_DRAFT if state.plain_reason else budget,
                opening=openings.get(state.req.rid),
                expected=state.expected if state.req.rid in openings else 0,
            )
            for state, length, end, refused in zip(states, lengths, ends, rejected, strict=True)
        ]
        now = time.monotonic()
        for state, length in zip(states, lengths, strict=True):
            state.sent = max(state.sent, length)
            state.length, state.tree, state.last_seen = length, EMPTY_TREE, now
        return entries, tokens[np.array(ends) - 1].astype(np.int64)

    def learn(self) -> None:
        """Passes on what became of the trees that the last entries settled. Nothing waits for it."""
        if self._outcome is not None:
            trees, on_path = self._outcome
            self._outcome = None
            probs = np.concatenate([tree.probs for tree in trees])
            self._on_outcome(probs, np.concatenate([tree.sources for tree in trees]), on_path)

    def has_news(self, reqs: Iterable[Req]) -> bool:
        """Whether the next entries tell more than tokens: that a draft was verified, or that a request is here."""
        return any(len(state.tree) for state in self._states.values()) or any(
            req.rid not in self._states for req in reqs
        )

    def roots(
        self, reqs: Sequence[Req], lengths: Sequence[int], pending: Sequence[Sequence[int]]
    ) -> np.ndarray:
        """Last accepted tokens (int64 [batch]) of a step that neither asks nor tells: the next entries hold its
        tokens too."""
        last, _ = self._joined(reqs, [length - 1 for length in lengths], lengths, pending)
        return last.astype(np.int64)

    def _reopen(self, req: Req) -> Opening:
        """For a request not seen before: its whole text goes with the step."""
        opening = self._open(req).opening
        self._states[req.rid].sent = 0
        return opening

    def _settle(
        self, states: Sequence[RequestState], tokens: np.ndarray, ends: Sequence[int], lengths: Sequence[int]
    ) -> list[tuple[Rejected, ...]]:
        """What was refused of the trees verified in the last step, a tuple a request. What was accepted waits for `learn`.

        tokens: int32, each request's newest up to its end."""
        trees = [state.tree for state in states]
        if not any(map(len, trees)):
            return [()] * len(states)
        spans = [
            (end - length + state.length, end)
            for state, end, length in zip(states, ends, lengths, strict=True)
        ]
        on_path, rejected = settle(trees, [state.length for state in states], tokens, spans)
        self._outcome = trees, on_path
        return rejected

    def note_drafted(self, reqs: Iterable[Req], trees: Iterable[DraftTree]) -> None:
        """trees: what is verified for the requests in this step."""
        for req, tree in zip(reqs, trees, strict=True):
            self._states[req.rid].tree = tree

    def closing_entry(self, rid: str) -> Entry | None:
        """Entry that ends the session with the tokens not yet sent; None if it is not open."""
        state = self._states.pop(rid, None)
        if state is None:
            return None
        req = state.req
        length = len(req.origin_input_ids) + len(
            req.output_ids if req.finished_len is None else req.output_ids[: req.finished_len]
        )
        tokens = self._tokens(req, state.sent, length, ())
        return Entry(state.session, min(state.sent, length), tokens, closing=True)

    def unseen_entries(self) -> list[Entry]:
        """Closing entries of requests that vanished."""
        limit = time.monotonic() - UNSEEN_SECONDS
        vanished = [rid for rid, state in self._states.items() if state.last_seen < limit]
        return [entry for rid in vanished if (entry := self.closing_entry(rid)) is not None]

    def clear(self) -> list[str]:
        """Forgets everything; returns the sessions that were open."""
        sessions = [state.session for state in self._states.values()]
        self._states.clear()
        return sessions

    def _joined(
        self,
        reqs: Sequence[Req],
        begins: Sequence[int],
        ends: Sequence[int],
        pending: Sequence[Sequence[int]],
    ) -> tuple[np.ndarray, list[int]]:
        """int32, the requests' tokens [begin, end) one after the other, and where each request's end there."""
        joined: list[int] = []
        stops = []
        for req, begin, end, tail in zip(reqs, begins, ends, pending, strict=True):
            joined += _listed(req, begin, end, tail)
            stops.append(len(joined))
        return in_vocabulary(joined, self._vocab_size), stops

    def _tokens(self, req: Req, start: int, end: int, pending: Sequence[int]) -> np.ndarray:
        """int32 tokens [start, end)."""
        return in_vocabulary(_listed(req, start, end, pending), self._vocab_size)


def _listed(req: Req, start: int, end: int, pending: Sequence[int]) -> list[int]:
    """Tokens [start, end) of prompt + output + what is pending beyond them."""
    prompt, output = req.origin_input_ids, req.output_ids
    known = len(prompt) + len(output)
    if end > known + len(pending):
        raise RuntimeError(f"request {req.rid}: {end} tokens expected, {known} known, {len(pending)} pending")
    tokens = list(prompt[start:end])
    tokens += output[max(0, start - len(prompt)) : max(0, end - len(prompt))]
    tokens += pending[max(0, start - known) : max(0, end - known)]
    return tokens
