"""The request book: the text of every running request, and what was verified for it last.

Under overlap scheduling a request object lags one step behind. The tokens of that step are pending: the worker reads them from
the batch's relay. A request's true length follows from its cached KV, which holds all tokens but the last one.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import TYPE_CHECKING

import numpy as np

from datastore_service.protocol.names import bounded_name
from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import MAX_PRIORS, Opening
from sglang_patches.exchange.text import Text
from sglang_patches.ledger.outcome import Outcome, settle
from sglang_patches.ledger.reference import SEPARATOR, Reference
from sglang_patches.ledger.usage import Usage

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_patches.options import Options

logger = logging.getLogger(__name__)

# Requests that vanished, neither finished nor aborted, leave the book after this time.
UNSEEN_SECONDS = 600.0
USAGE = "specstore_usage"  # attribute of a request of SGLang: its `Usage`, for the answer
# Of a request's `custom_params`: the tokens of its reference (`entry/references.py`).
REFERENCE_TOKENS = "specstore_reference"


class DraftSource(StrEnum):
    """What drafts, as a request names it in its wish `draft`. The datastore is all of its tiers."""

    DATASTORE = auto()
    DRAFT_MODEL = auto()
    HEAD = auto()
    REFERENCE = auto()


ALL_SOURCES = frozenset(DraftSource)


@dataclass(frozen=True)
class Step:
    """What a decode step begins with. lengths: true token count of each request. pending: its accepted tokens that are not yet
    in `output_ids`."""

    reqs: Sequence[Req]
    lengths: Sequence[int]
    pending: Sequence[Sequence[int]]

    @functools.cached_property
    def roots(self) -> list[int]:
        """Each request's last token, by SGLang's account. A request may hold more tokens than its KV accounts for: it was retracted, and
        its last step dropped."""
        rows = zip(self.reqs, self.lengths, self.pending, strict=True)
        return [_listed(req, length - 1, length, tail)[0] for req, length, tail in rows]


@dataclass(slots=True, eq=False)
class RequestState:
    """One running request.

    session: its name with the datastore and the draft side. tenant: that the request named, "" for the server's own. plain_reason: why nothing may be drafted for it, None if it may.
    expected: leading tokens that another instance has sent. tree: what is being verified. settled: tokens whose outcome is
    known. confirmed: leading tokens that were SGLang's when a step began. ended: its session is closed. ends: tokens that end it. usage: what
    its answer says of its steps. most_nodes: most drafted tokens that it wants verified in a step, None if it does not say. draft_sources: what may
    draft for it. reference: that it brought along, None without one. predicted: what that proposed for the step that is being verified. Overlap
    scheduling may launch a request once more after the step that ended it.
    """

    req: Req
    session: str
    opening: Opening
    tenant: str
    plain_reason: str | None
    expected: int
    text: Text
    settled: int
    confirmed: int
    ended: bool = False
    tree: DraftTree = EMPTY_TREE
    last_seen: float = 0.0
    ends: frozenset[int] = frozenset()
    usage: Usage = field(default_factory=Usage)
    most_nodes: int | None = None
    draft_sources: frozenset[str] = ALL_SOURCES
    reference: Reference | None = None
    predicted: DraftTree = EMPTY_TREE

    def takes_from(self, source: DraftSource) -> bool:
        """Whether the source may draft for it."""
        return not self.plain_reason and source in self.draft_sources

    def within_wish(self, tree: DraftTree) -> DraftTree:
        """The part of the tree that the request wants verified."""
        return tree if self.most_nodes is None else tree.first(self.most_nodes)


def _wishes(req: Req) -> dict:
    """`custom_params["specstore"]`: {"conversation": name, "draft": bool or names, "nodes": count, "priors": names, "publish": bool, "sources": bool,
    "tenant": name, "user": name, "workspace": name, "group": name}."""
    wishes = (req.sampling_params.custom_params or {}).get("specstore") or {}
    if not isinstance(wishes, dict):
        _report_no_object()
        return {}
    return {name: wish for name, wish in wishes.items() if wish is not None}


@functools.cache  # a client may send as many as it likes
def _report_no_object() -> None:
    logger.warning(
        "specstore: a request's custom_params.specstore is no object: it is ignored, and no other is told of"
    )


def request_opening(req: Req, publish: bool, epoch: int = 0) -> Opening:
    """Reads the request's `custom_params`. epoch: of the weights."""
    wishes = _wishes(req)
    conversation, user = str(wishes.get("conversation", "")), str(wishes.get("user", ""))
    return Opening(
        conversation=bounded_name(conversation) if conversation else "",
        publish=publish and wishes.get("publish", True) is True,  # what is no wish to publish is none
        prompt_length=len(req.origin_input_ids),
        priors=_names(wishes.get("priors")),
        workspace=next(iter(_names([wishes.get("workspace")])), ""),
        user=bounded_name(user) if user else "",
        group=next(iter(_names([wishes.get("group")])), ""),
        epoch=epoch,
    )


def _names(given: object) -> tuple[str, ...]:
    """The names that a request lists: checked by `entry/request_wishes.py`, and what is no list of names is none."""
    names = given if isinstance(given, list) else []
    return tuple(bounded_name(name) for name in names[:MAX_PRIORS] if isinstance(name, str))


def most_nodes(req: Req) -> int | None:
    """The most drafted tokens that the request wants verified in a step, None if it does not say."""
    nodes = _wishes(req).get("nodes") if draft_sources_of(req) else 0
    return nodes if isinstance(nodes, int) and nodes >= 0 else None  # what is no number is no wish


def draft_sources_of(req: Req) -> frozenset[str]:
    """What may draft for the request: everything if it does not say."""
    given = _wishes(req).get("draft", True)
    if isinstance(given, list):
        return ALL_SOURCES.intersection(name for name in given if isinstance(name, str))
    return frozenset() if given is False else ALL_SOURCES


def reference_of(req: Req, vocab_size: int) -> Reference | None:
    """The reference that the request brought along, None without one. A tokenizer may have more tokens than the model: text ends at those.

    SGLang's Rust server passes on what a client wrote: what are no tokens is no reference."""
    given = (req.sampling_params.custom_params or {}).get(REFERENCE_TOKENS)
    if not given or not isinstance(given, list) or not all(type(token) is int for token in given):
        return None
    inside = [token if 0 <= token < vocab_size else SEPARATOR for token in given]
    return Reference(np.array([*inside, SEPARATOR], np.int32))


def tenants_of(options: Options) -> Callable[[Req], str]:
    """The tenant that a request names, "" for the server's own; "" of all if the server takes none from requests."""
    if not options.request_tenant:
        return lambda req: ""
    return lambda req: str(_wishes(req).get("tenant", ""))  # checked by `entry/request_tenants.py`


def end_tokens(req: Req) -> frozenset[int]:
    """The tokens at which `Req._check_token_based_finish` ends the request."""
    if req.sampling_params.ignore_eos:
        return frozenset()
    ends = {*(req.sampling_params.stop_token_ids or ()), *(req.eos_token_ids or ())}
    if req.tokenizer is not None:
        ends |= {req.tokenizer.eos_token_id, *(req.tokenizer.additional_stop_token_ids or ())}
    return frozenset(ends - {None})


def in_vocabulary(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """int32; multimodal prompts hold hash values in place of image tokens, which become 0."""
    ids = np.array(tokens, dtype=np.int64)
    return np.where((ids >= 0) & (ids < vocab_size), ids, 0).astype(np.int32)


class RequestBook:
    """One per worker. A client may give its next request the name of one that it has aborted and that still runs, so names are no keys."""

    def __init__(
        self,
        vocab_size: int,
        publish: bool,
        tenant_of: Callable[[Req], str],
        needs_plain_step: Callable[[Req], str | None],
        begun_elsewhere: Callable[[Req], str | None] = lambda req: None,
        epoch: Callable[[], int] = lambda: 0,
    ) -> None:
        """Begins a book without requests.

        begun_elsewhere: name of the session that another instance has begun with the request's prompt, None if none has.
        epoch: that of the weights that a request begins with now.
        """
        self._vocab_size = vocab_size
        self._publish = publish
        self._tenant_of = tenant_of
        self._needs_plain_step = needs_plain_step
        self._begun_elsewhere = begun_elsewhere
        self._epoch = epoch
        self._states: dict[
            int, RequestState
        ] = {}  # by the identity of the request, which the state keeps alive
        self._of_step: list[RequestState] = []

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, state: RequestState) -> bool:
        return self._state_of(state.req) is state

    def open(self, reqs: Iterable[Req]) -> list[RequestState]:
        """Begins with the requests that are new, with their prompts as text; returns those."""
        return [self._open(req, len(req.origin_input_ids)) for req in reqs if self._state_of(req) is None]

    def read(self, step: Step) -> tuple[list[RequestState], list[RequestState]]:
        """Brings the texts up to date at the beginning of a step. Returns the requests' states and those of them of which tokens were
        taken back: SGLang drops the last step's result of a request that it retracts, and the whole output of one that has
        `input_embeds`."""
        states = [
            self._state_of(req) or self._open(req, length, tail)
            for req, length, tail in zip(step.reqs, step.lengths, step.pending, strict=True)
        ]
        behind = [
            row
            for row, (state, length, last) in enumerate(zip(states, step.lengths, step.roots, strict=True))
            if state.text.length != length or state.text.last != last
        ]
        for row in behind:
            if _has_begun_anew(states[row], step.lengths[row], step.roots[row]):
                states[row].confirmed = min(states[row].opening.prompt_length, step.lengths[row] - 1)
                states[row].tree = states[row].predicted = EMPTY_TREE
        self._write(states, step, behind)
        taken_back = [states[row] for row in behind if states[row].settled > states[row].confirmed]
        for state in taken_back:
            state.settled = state.confirmed
            if state.reference is not None:
                state.reference.begin_anew()
        now = time.monotonic()
        for state, length in zip(states, step.lengths, strict=True):
            state.confirmed, state.last_seen = length, now
        self._of_step = states
        return states, taken_back

    def read_ahead(self, step: Step) -> list[RequestState]:
        """Brings the texts up to date with the step that was read last and has been verified; SGLang may still drop its result."""
        self._write(self._of_step, step, range(len(self._of_step)))
        return self._of_step

    def settle(self, states: Sequence[RequestState]) -> list[Outcome]:
        """What became of the trees that were verified, for the requests that have new tokens."""
        news = [state for state in states if state.text.length > state.settled and not state.ended]
        outcomes = settle(
            news,
            [state.tree for state in news],
            [state.settled for state in news],
            [state.text.after(state.settled) for state in news],
        )
        for state, outcome in zip(news, outcomes, strict=True):
            outcome.predicted, state.predicted = state.predicted, EMPTY_TREE
            state.settled, state.tree = state.text.length, EMPTY_TREE
        return outcomes

    def close(self, rid: str) -> RequestState | None:
        """Ends with a request of that name: of several with the one that has finished, or else with the oldest."""
        named = [state for state in self._states.values() if state.req.rid == rid]
        ended = [state for state in named if state.req.finished()] or named
        return self.end(ended[0].req) if ended else None

    def end(self, req: Req) -> RequestState | None:
        """Ends with a request, its text brought up to its end; None if it is not there."""
        state = self._states.pop(id(req), None)
        if state is None:
            return None
        output = req.output_ids if req.finished_len is None else req.output_ids[: req.finished_len]
        length = len(req.origin_input_ids) + len(output)
        if length and _has_begun_anew(state, length, _listed(req, length - 1, length, ())[0]):
            state.confirmed = state.opening.prompt_length
        start = min(state.confirmed, length)
        state.text.rewrite(start, self._in_vocabulary(_listed(req, start, length, ())))
        return state

    def unseen(self) -> list[Req]:
        """Requests that vanished."""
        limit = time.monotonic() - UNSEEN_SECONDS
        return [state.req for state in self._states.values() if state.last_seen < limit]

    def clear(self) -> list[RequestState]:
        """Forgets all requests; returns them."""
        states = list(self._states.values())
        self._states.clear()
        return states

    def _state_of(self, req: Req) -> RequestState | None:
        return self._states.get(id(req))

    def _open(self, req: Req, length: int, pending: Sequence[int] = ()) -> RequestState:
        opening, nodes = request_opening(req, self._publish, self._epoch()), most_nodes(req)
        plain_reason = self._needs_plain_step(req) or ("its own wish" if nodes == 0 else None)
        sources = draft_sources_of(req)
        has_reference = not plain_reason and DraftSource.REFERENCE in sources
        reference = reference_of(req, self._vocab_size) if has_reference else None
        begun = self._begun_elsewhere(req)
        if begun and any(state.session == begun for state in self._states.values()):
            begun = None  # several samples of one prompt
        state = RequestState(
            req,
            begun or self._own_session(req.rid),
            opening,
            self._tenant_of(req),
            plain_reason,
            expected=opening.prompt_length if begun else 0,
            text=Text(self._in_vocabulary(_listed(req, 0, length, pending))),
            settled=length,
            confirmed=length,
            ended=req.finished(),
            last_seen=time.monotonic(),
            ends=end_tokens(req),
            usage=Usage(
                opening.prompt_length, bool(_wishes(req).get("sources", False)), reference is not None
            ),
            most_nodes=nodes,
            draft_sources=sources,
            reference=reference,
        )
        setattr(req, USAGE, state.usage)
        if not state.ended:
            self._states[id(req)] = state
        return state

    def _own_session(self, rid: str) -> str:
        """A name that no session of this worker has."""
        taken = {state.session for state in self._states.values()}
        names = itertools.chain([rid], (f"{rid}#{number}" for number in itertools.count(2)))
        return next(name for name in map(bounded_name, names) if name not in taken)

    def _write(self, states: Sequence[RequestState], step: Step, rows: Sequence[int]) -> None:
        """Writes the texts of these rows from where they are confirmed to the step's lengths; one conversion for all."""
        joined: list[int] = []
        ends = []
        for row in rows:
            joined += _listed(step.reqs[row], states[row].confirmed, step.lengths[row], step.pending[row])
            ends.append(len(joined))
        tokens, begin = self._in_vocabulary(joined), 0
        for row, end in zip(rows, ends, strict=True):
            states[row].text.rewrite(states[row].confirmed, tokens[begin:end])
            begin = end

    def _in_vocabulary(self, tokens: Sequence[int]) -> np.ndarray:
        return in_vocabulary(tokens, self._vocab_size)


def _has_begun_anew(state: RequestState, length: int, last: int) -> bool:
    """Whether SGLang has dropped tokens that were confirmed. Before it decodes such a request again it prefills it, which brings one token:
    its text is shorter then, or differs in its last token."""
    return length < state.confirmed or (length == state.confirmed and state.text.at(length - 1) != last)


def _listed(req: Req, start: int, end: int, pending: Sequence[int]) -> Sequence[int]:
    """Tokens [start, end) of prompt + output + what is pending beyond them."""
    prompt, output = req.origin_input_ids, req.output_ids
    known = len(prompt) + len(output)
    if known <= start and end <= known + len(pending):  # under overlap scheduling most often
        return pending[start - known : end - known]
    if not start <= end <= known + len(pending):
        raise RuntimeError(
            f"request {req.rid}: tokens {start} to {end} expected, {known} known, {len(pending)} pending"
        )
    tokens = list(prompt[start:end])
    tokens += output[max(0, start - len(prompt)) : max(0, end - len(prompt))]
    tokens += pending[max(0, start - known) : max(0, end - known)]
    return tokens
