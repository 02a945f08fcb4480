"""A worker: one Draft stream at a time, a few sessions on it, every reply checked."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import numpy as np

from datastore_service.client import wire
from datastore_service.protocol.types import Budget, Entry, Opening, Rejected, Reply, Status
from proto_gen.specstore.v1.drafting_pb2_grpc import DraftingStub
from tests.soak.tenant import CHANNEL_OPTIONS, Tenant, probe
from tests.soak.texts import Document
from tests.support.replies import read_sound

THINKING = 0.002  # seconds between two rounds
RECONNECT = 0.1
CUT = 0.01  # of the rounds end with a broken stream
ABANDONED = 0.2  # of the sessions on it are not taken up again


class StreamEndedError(Exception):
    """The service, or this worker, has ended the stream."""


@dataclass
class Chat:
    """A session. known: tokens the service has said it holds. sent: tokens it may hold. begun: when the first was sent.
    confirmed: when, and on which stream, the service last said that it has the session. loose: a message was never
    answered, and may yet be read. closing: such a message closes the session."""

    name: str
    document: Document
    opening: Opening
    known: int = 0
    sent: int = 0
    open: bool = False
    begun: float = 0.0
    confirmed: tuple[float, int] = (0.0, 0)
    loose: bool = False
    closing: bool = False


@dataclass(frozen=True)
class Asked:
    """An entry and what it must be answered if the session is known. chat: None for a probe."""

    entry: Entry
    chat: Chat | None
    document: Document
    status: Status
    known: int
    at: float


class Worker:
    """waiting: since when it waits for a reply, None while it does not."""

    def __init__(self, tenant: Tenant, number: int) -> None:
        self._tenant, self._name = tenant, f"worker {number}"
        self._rng = random.Random(f"{tenant.plan.seed} {tenant.number} {number}")
        self._chats: list[Chat] = []
        self._begun = 0  # sessions
        self._stream = 0  # number of the current one
        self._step = 0
        self._just_closed: list[Chat] = []
        self.waiting: float | None = None
        self.thread = threading.Thread(target=self._work, name=self._name, daemon=True)

    def give_up(self, why: str) -> None:
        self._tenant.find(f"{self._name}: {why}")
        self._call.cancel()

    def verify(self, numbers: Sequence[int], batch: int = 64) -> None:
        """Looks documents up on a stream of its own."""
        with grpc.insecure_channel(self._tenant.plan.endpoint, CHANNEL_OPTIONS) as channel:
            self._connect(channel)
            for first in range(0, len(numbers), batch):
                documents = [self._tenant.texts.document(n) for n in numbers[first : first + batch]]
                self._exchange([[self._probe(document) for document in documents]])
            self._outbound.put(None)

    def _work(self) -> None:
        while not self._tenant.stopping.is_set():
            try:
                with grpc.insecure_channel(self._tenant.plan.endpoint, CHANNEL_OPTIONS) as channel:
                    self._connect(channel)
                    while not self._tenant.stopping.is_set():
                        self._round()
                        time.sleep(THINKING)
                    self._leave()
            except StreamEndedError:
                self._tenant.count("broken streams")
                self._chats = [chat for chat in self._chats if self._rng.random() > ABANDONED]
                time.sleep(RECONNECT)

    # The stream

    def _connect(self, channel: grpc.Channel) -> None:
        self._stream += 1
        self._stops = self._tenant.plan.stops.value
        self._outbound: queue.SimpleQueue = queue.SimpleQueue()
        self._call = DraftingStub(channel).Draft(iter(self._outbound.get, None))
        self._just_closed = []
        self._send([], greeting=True)
        self._receive(self._step)
        self._tenant.count("streams")

    def _send(self, entries: Sequence[Entry], greeting: bool = False) -> int:
        self._step += 1
        request = wire.request_message(self._step, entries)
        if greeting:
            request.namespace.CopyFrom(self._tenant.namespace)
        self._outbound.put(request)
        return self._step

    def _receive(self, step: int) -> list[Reply]:
        self.waiting = time.monotonic()
        try:
            message = next(self._call)
        except grpc.RpcError as error:
            self._check_end(error)
            raise StreamEndedError from error
        except StopIteration:
            self._tenant.find(f"{self._name}: the service ended the stream without a status")
            raise StreamEndedError from None
        finally:
            self.waiting = None
        if message.step != step:
            self._tenant.find(f"{self._name}: reply to step {message.step} instead of {step}")
        self._tenant.count("messages")
        return read_sound(message)

    def _check_end(self, error: grpc.RpcError) -> None:
        stopped = error.code() is grpc.StatusCode.UNAVAILABLE or (
            error.code() is grpc.StatusCode.CANCELLED and self._tenant.may_be_cancelled(self._stops)
        )
        dropped = error.code() is grpc.StatusCode.FAILED_PRECONDITION and "was dropped" in error.details()
        if not stopped and not (dropped and not self._tenant.keeps):
            self._tenant.find(f"{self._name}: stream ended: {error.code().name}: {error.details()}")

    def _exchange(self, messages: list[list[Asked]]) -> None:
        """Sends the messages at once, then reads their replies. No session is in two of them."""
        steps = [self._send([asked.entry for asked in message]) for message in messages]
        try:
            for step, message in zip(steps, messages, strict=True):
                replies = self._receive(step)
                if len(replies) != len(message):
                    self._tenant.find(f"{self._name}: {len(replies)} replies to {len(message)} entries")
                for asked, reply in zip(message, replies, strict=False):
                    self._judge(asked, reply)
                message.clear()
        finally:
            self._unanswered([asked for message in messages for asked in message])

    @staticmethod
    def _unanswered(left: list[Asked]) -> None:
        for asked in left:
            if asked.chat is not None:
                asked.chat.loose = True
                asked.chat.closing |= asked.entry.closing

    # A round

    def _round(self) -> None:
        probes = self._fresh_probes()
        while len(self._chats) < self._tenant.plan.sessions:
            self._chats.append(self._begin())
        chats = self._rng.sample(self._chats, self._rng.randint(1, len(self._chats)))
        asked = [self._advance(chat) for chat in chats]
        if self._rng.random() < 0.3:
            numbers = self._tenant.ledger.sample(1, self._rng)
            probes += [self._probe(self._tenant.texts.document(number)) for number in numbers]
        parts = self._rng.randint(1, 3)
        messages = [probes] * bool(probes) + [asked[i::parts] for i in range(parts)]
        if self._rng.random() < CUT:
            self._cut(messages)
        self._exchange(messages)

    def _begin(self) -> Chat:
        self._begun += 1
        document, name = self._tenant.write(), f"{self._name} chat {self._begun}"
        conversation = name if self._rng.random() < 0.2 else ""
        publish = not conversation and self._rng.random() < 0.9
        return Chat(name, document, Opening(conversation, publish, document.prompt_length))

    def _advance(self, chat: Chat) -> Asked:
        """The session's next entry, or one that repeats or goes too far ahead."""
        now, text = time.monotonic(), chat.document.tokens
        certain = chat.open and chat.known == chat.sent and not chat.loose
        chat.begun = chat.begun or now
        if certain and self._rng.random() < 0.03:
            entry = Entry(chat.name, chat.known + 1 + self._rng.randint(0, 5), text[:1])
            return Asked(entry, chat, chat.document, Status.GAP, chat.known, now)
        opening = None if chat.open and self._rng.random() > 0.03 else chat.opening
        repeated = self._rng.randint(0, 20) if self._rng.random() < 0.1 else 0
        start = 0 if opening else max(0, chat.known - repeated)
        end = min(len(text), max(chat.sent, chat.opening.prompt_length) + self._rng.randint(0, 8))
        entry = Entry(
            chat.name,
            start,
            text[start:end],
            rejected=self._rejected(end),
            budget=self._rng.choice((Budget(0), Budget(4), Budget(16), Budget(32, 8, 2))),
            opening=opening,
            closing=end == len(text) and self._rng.random() < 0.7,
        )
        chat.sent = end
        return Asked(entry, chat, chat.document, Status.OK, end, now)

    def _rejected(self, position: int) -> tuple[Rejected, ...]:
        first = self._tenant.texts.first_id
        siblings = [first + self._rng.randint(0, 50) for _ in range(self._rng.choice((0, 0, 1, 3)))]
        return (Rejected(position, np.array(siblings, dtype=np.int32)),) if siblings else ()

    def _probe(self, document: Document) -> Asked:
        self._begun += 1
        entry = probe(document, f"{self._name} probe {self._begun}")
        return Asked(entry, None, document, Status.OK, len(document.context), time.monotonic())

    def _recall(self, chat: Chat) -> Asked:
        """What a conversation's next request is drafted; `at` is when the one before was still open."""
        entry = probe(chat.document, f"{chat.name} again", chat.opening.conversation)
        return Asked(entry, None, chat.document, Status.OK, len(chat.document.context), chat.confirmed[0])

    def _fresh_probes(self) -> list[Asked]:
        """What was closed by the last message must be found by the next."""
        closed, self._just_closed = self._just_closed, []
        return [
            self._recall(chat) if chat.opening.conversation else self._probe(chat.document) for chat in closed
        ]

    def _cut(self, messages: list[list[Asked]]) -> None:
        """Breaks the stream after some messages, which may or may not be read."""
        sent = messages[: self._rng.randint(0, len(messages))]
        for message in sent:
            self._send([asked.entry for asked in message])
        self._unanswered([asked for message in sent for asked in message])
        if self._rng.random() < 0.5:
            time.sleep(self._rng.uniform(0, 0.05))
        self._call.cancel()
        raise StreamEndedError

    def _leave(self) -> None:
        """Closes what is open, as it is: nobody asks about text that was not sent to its end."""
        entries = [Entry(chat.name, chat.known, closing=True) for chat in self._chats if chat.open]
        self._receive(self._send(entries))
        self._outbound.put(None)

    # Replies

    def _judge(self, asked: Asked, reply: Reply) -> None:
        chat, what = asked.chat, f"{asked.entry.session} from {asked.entry.start} to {asked.known}"
        self._tenant.count("entries")
        if reply.status is Status.UNKNOWN_SESSION and self._may_be_unknown(asked):
            self._tenant.count("unknown sessions")
            if chat is not None:
                chat.open, chat.known = False, 0
            return
        if (reply.status, reply.known) != (asked.status, asked.known):
            self._tenant.find(f"{what}: {reply.status.name}, known {reply.known}, not {asked.status.name}")
            return
        if chat is None:
            self._judge_probe(asked, reply)
        else:
            self._judge_chat(asked, chat, reply)

    def _may_be_unknown(self, asked: Asked) -> bool:
        """An opening only if it closes too and a call has ended sessions meanwhile. Otherwise: the stream is new since
        it was confirmed, a call has ended sessions or a closing that was thought lost was read after all."""
        chat, ended_since = asked.chat, self._tenant.ledger.sessions_ended_since
        if chat is None or asked.entry.opening is not None:
            return asked.entry.closing and ended_since(asked.at)
        moment, stream = chat.confirmed
        return stream != self._stream or ended_since(moment) or chat.closing

    def _judge_chat(self, asked: Asked, chat: Chat, reply: Reply) -> None:
        if len(reply.tree):
            last = int(chat.document.tokens[asked.known - 1])
            self._tenant.check_tree(reply.tree, last, asked.entry.budget, chat.name)
            self._tenant.count("drafts")
        if asked.status is not Status.OK:
            return
        chat.open, chat.known, chat.confirmed = True, asked.known, (asked.at, self._stream)
        if asked.entry.closing:
            self._closed(chat)

    def _closed(self, chat: Chat) -> None:
        self._chats.remove(chat)
        self._tenant.count("closed sessions")
        if chat.opening.publish:
            self._tenant.ledger.published(chat.document.number, chat.begun, once=not chat.loose)
        else:
            self._tenant.ledger.withheld(chat.document.number)
        self._just_closed.append(chat)

    def _judge_probe(self, asked: Asked, reply: Reply) -> None:
        conversation = asked.entry.opening.conversation
        if not conversation:
            self._tenant.check_probe(asked.document, reply.tree, asked.at)
        elif not self._tenant.ledger.sessions_ended_since(asked.at):
            self._tenant.check_recall(asked.document, reply.tree, conversation)
