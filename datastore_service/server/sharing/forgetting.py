"""Takes the text of subjects out of a tenant's streams, and has every service forget it that reads one of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import cast

from redis import Redis

from datastore_service.engine.provenance import Subject, belonging_to
from datastore_service.server.sharing.keys import keys_named, tenant_prefix
from datastore_service.server.sharing.messages import forget_message, provenance_in
from datastore_service.server.sharing.stream import START, messages_after


def have_forgotten(client: Redis, tenant: str, subjects: Collection[Subject]) -> None:
    """Raises RedisError, and may then be called again. Of the texts that are in a stream by now a service has read and forgotten, or
    never reads, each one: the message comes after all of them."""
    digests = cast("set[bytes]", client.smembers(f"{tenant_prefix(tenant)}namespaces"))
    streams = [keys_named(tenant, digest.decode()).texts for digest in digests]
    for stream in streams:
        client.xadd(stream, forget_message(subjects))
    for stream in streams:
        for numbers in _of(client, stream, subjects):
            client.xdel(stream, *numbers)


def _of(client: Redis, stream: str, subjects: Collection[Subject]) -> Iterator[list[bytes]]:
    """The numbers of messages with text of the subjects, some at a time."""
    chosen, position = belonging_to(subjects), START
    while messages := messages_after(client, stream, position):
        found = [number for number, fields in messages if chosen(provenance_in(fields)).any()]
        if found:
            yield found
        position = messages[-1][0].decode()
