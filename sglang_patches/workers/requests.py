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

from datastore_service.engine.tree import EMPTY_TREE, DraftTree
from datastore_service.engine.types import NO_DRAFT, Budget, Entry, Opening, Rejected

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


def accepted_nodes(tree: DraftTree, accepted: Sequence[int]) -> np.ndarray:
    """bool [nodes]: which of the verified tree's nodes lie on the path of the tokens accepted after it was drafted."""
    on_path = np.zeros(len(tree), dtype=np.bool_)
    node = -1
    for token in accepted:
        chosen = np.flatnonzero((tree.parents == node) & (tree.tokens == token))
        if len(chosen) == 0:
            break
        node = int(chosen[0])
        on_path[node] = True
    return on_path


def rejected_siblings(tree: DraftTree, length: int, on_path: np.ndarray) -> tuple[Rejected, ...]:
    """The drafted tokens that were verified and refused: at each depth of the accepted path, the siblings of the token
    the target chose. length: tokens of the session before the step."""
    rejected = []
    for depth, node in enumerate([-1, *np.flatnonzero(on_path).tolist()]):
        refused = (tree.parents == node) & ~on_path
        if refused.any():
            rejected.append(Rejected(length + depth, tree.tokens[refused]))
    return tuple(rejected)


class RequestTracker:
    """One per worker; keyed by request id, which is also the session's name unless another instance has begun it."""

    def __init__(
        self,
        vocab_size: int,
        publish: bool,
        needs_plain_step: Callable[[Req], str | None],
        on_outcome: Callable[[DraftTree, np.ndarray], None],
        begun_elsewhere: Callable[[Req], str | None] = lambda req: None,
    ) -> None:
        """on_outcome: called with each verified tree and its accepted_nodes, one step later. begun_elsewhere: name of the
        session that another instance has begun with the request's prompt, None if none has."""
        self._vocab_size = vocab_size
        self._publish = publish
        self._needs_plain_step = needs_plain_step
        self._on_outcome = on_outcome
        self._begun_elsewhere = begun_elsewhere
        self._states: dict[str, RequestState] = {}

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
        entries = [
            self._step(req, length, tail, budget)
            for req, length, tail in zip(reqs, lengths, pending, strict=True)
        ]
        roots = np.array([entry_root for _, entry_root in entries], dtype=np.int64)
        return [entry for entry, _ in entries], roots

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
        roots = [
            self._tokens(req, length - 1, length, tail)[0]
            for req, length, tail in zip(reqs, lengths, pending, strict=True)
        ]
        return np.array(roots, dtype=np.int64)

    def _step(self, req: Req, length: int, pending: Sequence[int], budget: Budget) -> tuple[Entry, int]:
        opening = None
        if req.rid not in self._states:
            opening = self._open(req).opening
            self._states[req.rid].sent = 0
        state = self._states[req.rid]
        state.last_seen = time.monotonic()
        tokens = self._tokens(req, min(state.sent, length - 1), length, pending)
        root = int(tokens[-1])
        entry = Entry(
            state.session,
            state.sent,
            tokens if state.sent < length else tokens[:0],
            rejected=self._settle(state, length, pending),
            budget=NO_DRAFT if state.plain_reason else budget,
            opening=opening,
            expected=state.expected if opening else 0,
        )
        state.sent = max(state.sent, length)
        state.length, state.tree = length, EMPTY_TREE
        return entry, root

    def _settle(self, state: RequestState, length: int, pending: Sequence[int]) -> tuple[Rejected, ...]:
        """Learns from the tree verified in the last step; returns what of it was refused."""
        tree = state.tree
        if len(tree) == 0:
            return ()
        on_path = accepted_nodes(tree, self._tokens(state.req, state.length, length, pending).tolist())
        self._on_outcome(tree, on_path)
        return rejected_siblings(tree, state.length, on_path)

    def note_drafted(self, req: Req, tree: DraftTree) -> None:
        """tree: what is about to be verified for the request."""
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

    def _tokens(self, req: Req, start: int, end: int, pending: Sequence[int]) -> np.ndarray:
        """int32 tokens [start, end) of prompt + output + what is pending beyond them."""
        prompt, output = req.origin_input_ids, req.output_ids
        known = len(prompt) + len(output)
        if end > known + len(pending):
            raise RuntimeError(
                f"request {req.rid}: {end} tokens expected, {known} known, {len(pending)} pending"
            )
        tokens = [
            *prompt[start:end],
            *output[max(0, start - len(prompt)) : max(0, end - len(prompt))],
            *pending[max(0, start - known) : max(0, end - known)],
        ]
        return in_vocabulary(tokens, self._vocab_size)
