"""The right of one process to speak in a stream under a service's name. A copy of a data directory has the same name."""

from __future__ import annotations

import secrets
import time

from redis import Redis
from redis.exceptions import RedisError

LEASE_SECONDS = 3  # a service that was killed keeps its next process waiting so long
RENEW_SECONDS = 1.0


class NameTakenError(RedisError):
    """Two processes have one service's name."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"another process shares as service {name}, so one of the two runs with a copy of a data directory: stop that one, remove "
            "share.json from the copy, and start it again"
        )


class Lease:
    """A key on the server that its holder renews. Every method may raise RedisError.

    key: of the stream and the service. name: the service's."""

    def __init__(self, key: str, name: str) -> None:
        self._key, self._name, self._holder = key, name, secrets.token_bytes(8)
        self._renewed: float | None = None  # of time.monotonic(); None while another has it
        self._refused: float | None = None  # since when it is another's

    def held(self, client: Redis) -> bool:
        """Takes the lease or renews it. False while another process has it that may be over, as this service's last is after a kill.
        Raises NameTakenError once it must have been renewed."""
        now = time.monotonic()
        if self._renewed is not None and now < self._renewed + RENEW_SECONDS:
            return True
        holder = client.set(self._key, self._holder, ex=LEASE_SECONDS, nx=True, get=True)
        if holder not in (None, self._holder):
            return self._wait(now)
        if holder:
            client.set(self._key, self._holder, ex=LEASE_SECONDS)
        self._renewed, self._refused = now, None
        return True

    def end(self, client: Redis) -> None:
        """Lets this service's next process begin at once."""
        if client.get(self._key) == self._holder:
            client.delete(self._key)

    def _wait(self, now: float) -> bool:
        self._renewed, self._refused = None, now if self._refused is None else self._refused
        if now > self._refused + LEASE_SECONDS:
            raise NameTakenError(self._name)
        return False
