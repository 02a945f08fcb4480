"""Places in a stream, and the messages after one."""

from __future__ import annotations

from typing import cast

from redis import Redis

BATCH = 64  # messages that are read or written at a time, and entries that a stream is cut by
START = "0-0"


def messages_after(
    client: Redis, stream: str, position: str, count: int = BATCH
) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The next messages of a stream, each with its number there. Raises RedisError."""
    return cast("list", client.xrange(stream, f"({position}", "+", count))


def last_id(client: Redis, stream: str) -> str:
    """The number of the newest message that the stream ever had."""
    return client.xinfo_stream(stream)["last-generated-id"].decode() if client.exists(stream) else START


def order(position: str) -> tuple[int, ...]:
    """What positions are compared by."""
    return tuple(map(int, position.split("-")))
