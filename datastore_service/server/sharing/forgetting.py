"""Forgets of this service: they are noted, told in all streams of the tenant, whose text of the subjects is removed, and read here too."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import cast

import numpy as np
from redis import Redis

from datastore_service.engine.provenance import Subject, belonging_to
from datastore_service.server.sharing.keys import keys_named, tenant_prefix
from datastore_service.server.sharing.messages import MOST_SUBJECTS, forget_message, provenance_in
from datastore_service.server.sharing.places import START, messages_after, order
from datastore_service.storage.share_file import ShareState

Told = dict[str, frozenset[Subject]]  # by the number of the message


class Forgets:
    """What the others are to forget. From the note on until this service reads its own message, it takes nothing of the subjects that the
    others published: they forget that when they read the message. Its own text is left alone at the message: the call has forgotten
    what there was, and what came since stays.

    state: changed under `lock`. write: puts it into its file, under `lock`."""

    def __init__(self, state: ShareState, lock: threading.Lock, write: Callable[[], None]) -> None:
        self.lock = lock
        self._state, self._write = state, write
        self._calls: Counter[tuple[str, Subject]] = Counter()  # of this process, by what is noted
        self._told: dict[str, Told] = defaultdict(dict)  # by stream; not read here yet

    def note(self, tenant: str, subjects: Collection[Subject]) -> None:
        """Has the others forget subjects, soon: once this returns, it outlives the process. Raises OSError."""
        with self.lock:
            noted = {(tenant, subject) for subject in subjects}
            self._calls.update(noted)
            self._state.forgetting |= noted
            self._write()

    def due(self) -> dict[str, dict[Subject, int]]:
        """The subjects that the others were not told of, by tenant, each with the number of its calls."""
        due: dict[str, dict[Subject, int]] = defaultdict(dict)
        with self.lock:
            for tenant, subject in self._state.forgetting:
                due[tenant][subject] = self._calls[tenant, subject]
        return due

    def tell(self, client: Redis, tenant: str, due: Mapping[Subject, int], digests: Collection[str]) -> None:
        """Tells the others of what `due` has of a tenant. A subject that was called for again meanwhile stays due. Raises RedisError, and
        may then be called again.

        digests: of the tenant's namespaces that are hosted here; the server may have lost its set."""
        have_forgotten(client, tenant, due, digests, self._told)
        with self.lock:
            for subject, calls in due.items():
                if self._calls[tenant, subject] == calls:
                    self._state.forgetting.discard((tenant, subject))
                    del self._calls[tenant, subject]
            self._write()

    def is_own(self, stream: str, number: bytes) -> bool:
        """Whether a message is one with which this process has told the others."""
        return number.decode() in self._told.get(stream, {})

    def passed(self, stream: str, position: str) -> None:
        """Notes that this service has read a stream up to there."""
        if told := self._told.get(stream):
            self._told[stream] = {at: of for at, of in told.items() if order(at) > order(position)}

    def lost(self, stream: str) -> None:
        """Notes that the server has lost messages of a stream."""
        self._told.pop(stream, None)

    def covers(self, tenant: str, stream: str, provenance: np.ndarray) -> bool:
        """Whether a text that another service has published is to be forgotten. Called under `lock`, which is held until the text is in the
        live tier: the call that notes the subjects forgets what is in it then. provenance: PROVENANCE [1]."""
        told = self._told.get(stream, {}).values()
        subjects = {subject for of, subject in self._state.forgetting if of == tenant}.union(*told)
        return bool(subjects and belonging_to(subjects)(provenance).any())


def have_forgotten(
    client: Redis,
    tenant: str,
    subjects: Collection[Subject],
    digests: Collection[str],
    told: dict[str, Told],
) -> None:
    """Raises RedisError, and may then be called again. Of the texts that are in a stream by now a service has read and forgotten, or
    never reads, each one: the message comes after all of them.

    told: gets the messages."""
    known = cast("set[bytes]", client.smembers(f"{tenant_prefix(tenant)}namespaces"))
    named = {digest.decode() for digest in known}.union(digests)
    streams = [keys_named(tenant, digest).texts for digest in sorted(named)]
    for part in _parts(subjects):
        for stream in streams:
            number = cast("bytes", client.xadd(stream, forget_message(part)))
            told[stream][number.decode()] = part
    for stream in streams:
        for numbers in _of(client, stream, subjects):
            client.xdel(stream, *numbers)


def _parts(subjects: Collection[Subject]) -> Iterator[frozenset[Subject]]:
    """The subjects in parts, each of as many as a message may have."""
    in_order = sorted(subjects, key=str)
    for begin in range(0, len(in_order), MOST_SUBJECTS):
        yield frozenset(in_order[begin : begin + MOST_SUBJECTS])


def _of(client: Redis, stream: str, subjects: Collection[Subject]) -> Iterator[list[bytes]]:
    """The numbers of messages with text of the subjects, some at a time."""
    chosen, position = belonging_to(subjects), START
    while messages := messages_after(client, stream, position):
        found = [number for number, fields in messages if chosen(provenance_in(fields)).any()]
        if found:
            yield found
        position = messages[-1][0].decode()
