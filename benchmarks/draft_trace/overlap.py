"""How much of the draft model's time lay beside the target's forwards, by both processes' clocks, which are one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.draft_trace import events
from benchmarks.draft_trace.events import Event, answers_of, messages_of
from benchmarks.draft_trace.replay import LookedUp
from sglang_patches.drafting.messages import Expected, Growth, Message

VERIFY = "TARGET_VERIFY"  # SGLang's mode of a decode step's forward

Span = tuple[int, int]  # nanoseconds


@dataclass(frozen=True)
class Share:
    """Of one decode step: from its forward's begin to the next one's. busy: nanoseconds that the draft model ran, decoding or
    prefilling. hidden: those of them in which the target ran too. waited: that the worker waited for the draft side."""

    at: int
    busy: int
    hidden: int
    waited: int
    seconds: float


def shares(worker: Sequence[Event], draft: Sequence[Event]) -> list[Share]:
    """Of all decode steps but the last, whose end is not known."""
    target = [(event.began, event.at) for event in worker if isinstance(event, events.Forward)]
    begins = [event.began for event in worker if isinstance(event, events.Forward) and event.mode == VERIFY]
    busy, waited = draft_spans(draft), waits(worker)
    return [
        Share(
            begin,
            length(within(busy, (begin, end))),
            sum(length(within(target, span)) for span in within(busy, (begin, end))),
            length(within(waited, (begin, end))),
            (end - begin) / 1e9,
        )
        for begin, end in pairwise(begins)
    ]


@dataclass(frozen=True)
class Spoken:
    """An early exit, beside its verification. at: when that began. posted, heard: the share of it that had passed when what the exit
    expects was posted, and when the draft side heard it: above 1 once the verification was over."""

    at: int
    posted: float
    heard: float


def spoken(worker: Sequence[Event], draft: Sequence[Event]) -> list[Spoken]:
    """Of each verification of which an early exit spoke."""
    forwards = [(e.began, e.at) for e in worker if isinstance(e, events.Forward) and e.mode == VERIFY]
    told = {(posted, heard) for kind, posted, heard in _crossed(worker, draft) if kind is Expected}
    return [
        Spoken(begin, (posted - begin) / (end - begin), (heard - begin) / (end - begin))
        for posted, heard in sorted(told)
        for begin, end in forwards
        if begin <= posted < end
    ]


def draft_spans(draft: Sequence[Event]) -> list[Span]:
    spans = []
    for event in draft:
        if isinstance(event, events.Worked) and event.forward is not None:
            spans.append((event.forward.began, event.forward.at))
        if isinstance(event, events.Worked) and event.prefilled is not None and event.prefilled[0]:
            spans.append(event.prefilled[1:])
    return spans


def waits(worker: Sequence[Event]) -> list[Span]:
    """In which the worker waited for the draft side."""
    return [
        (event.began, event.at)
        for event in worker
        if isinstance(event, events.Collected) and event.patience > 0
    ]


def within(spans: Sequence[Span], window: Span) -> list[Span]:
    """Their parts in the window."""
    cut = ((max(begin, window[0]), min(end, window[1])) for begin, end in spans)
    return [(begin, end) for begin, end in cut if begin < end]


def length(spans: Sequence[Span]) -> int:
    """Of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


def outside(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Their parts in none of the others."""
    for begin, end in others:
        spans = [part for one in spans for part in ((one[0], min(one[1], begin)), (max(one[0], end), one[1]))]
        spans = [part for part in spans if part[0] < part[1]]
    return list(spans)


# A picture of some steps


def timeline(
    worker: Sequence[Event], draft: Sequence[Event], looked_up: Sequence[LookedUp], window: Span
) -> list[dict]:
    """What happened in the window, in milliseconds from its begin: rows with `kind`, `from`, `to` and `label`."""
    return [
        {"kind": kind, "from": (begin - window[0]) / 1e6, "to": (end - window[0]) / 1e6, "label": label}
        for kind, begin, end, label in _happened(worker, draft, looked_up)
        if begin < window[1] and end > window[0]
    ]


def _happened(
    worker: Sequence[Event], draft: Sequence[Event], looked_up: Sequence[LookedUp]
) -> Iterator[tuple[str, int, int, str]]:
    forwards = [event for event in worker if isinstance(event, events.Forward)]
    for forward in forwards:
        yield "target", forward.began, forward.at, str(forward.requests * forward.width)
    steps = [(event.began, event.at) for event in worker if isinstance(event, events.Step)]
    for begin, end in outside(steps, [(forward.began, forward.at) for forward in forwards]):
        yield "worker", begin, end, ""
    for begin, end in waits(worker):
        yield "wait", begin, end, ""
    for event in draft:
        if isinstance(event, events.Worked) and event.forward is not None:
            yield "draft", event.forward.began, event.forward.at, str(len(event.forward.rows))
    for begin, end in messages(worker, draft):
        yield "message", begin, end, ""
    for begin, end in answers(worker, draft):
        yield "answer", begin, end, ""
    for found in looked_up:
        yield "lookup", found.at, found.at + 1, " ".join(found.results)


def messages(worker: Sequence[Event], draft: Sequence[Event]) -> list[Span]:
    """From the worker's posting of a message to the draft side's hearing it."""
    return sorted({(posted, heard) for _, posted, heard in _crossed(worker, draft)})


def _crossed(worker: Sequence[Event], draft: Sequence[Event]) -> Iterator[tuple[type[Message], int, int]]:
    """Each message: what it is, when it was posted and when it was heard. A session's messages keep their order."""
    posted = [(event.at, event.frame) for event in worker if isinstance(event, events.Posted)]
    heard = [(event.at, event.frame) for event in draft if isinstance(event, events.Heard)]
    sent = {key: at for key, _, at in _numbered(posted)}
    return ((kind, sent[key], at) for key, kind, at in _numbered(heard) if key in sent)


def _numbered(
    frames: Iterable[tuple[int, bytes]],
) -> Iterator[tuple[tuple[str, int], type[Message], int]]:
    """Each message's session and its number there, what it is, and the time of its frame."""
    numbers: Counter[str] = Counter()
    for at, frame in frames:
        for message in messages_of(frame):
            yield (message.session, numbers[message.session]), type(message), at
            numbers[message.session] += 1


def answers(worker: Sequence[Event], draft: Sequence[Event]) -> list[Span]:
    """From the draft side's saying what has grown to the worker's collecting it."""
    said = {
        (answer.session, answer.epoch, answer.turn): event.at
        for event in draft
        if isinstance(event, events.Heard | events.Worked)
        for answer in answers_of(event.answers)
        if isinstance(answer, Growth)
    }
    collected = {
        (answer.session, answer.epoch, answer.turn): event.at
        for event in worker
        if isinstance(event, events.Collected)
        for answer in answers_of(event.frame)
        if isinstance(answer, Growth)
    }
    return sorted({(said[key], at) for key, at in collected.items() if key in said})
