"""Services and the server that they share over are killed while all services publish: what was acknowledged is at each service, once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from datastore_service.client.base import DatastoreError
from datastore_service.engine.provenance import PROVENANCE
from datastore_service.server.sharing.keys import keys_of
from datastore_service.server.sharing.messages import provenance_in
from tests.integration.datastore.sharing import LENGTH, NAMESPACE, Member, outputs
from tests.support.servers.share import ShareServer
from tests.waiting import eventually

PERMITTED = 60  # outputs of each service between two kills or starts
MOST = 20_000  # outputs of a service


class Published:
    """What a service was asked to publish. doubtful: it was killed before it answered. failures: it was not, and did not publish."""

    def __init__(self) -> None:
        self.acknowledged: list[np.ndarray] = []
        self.doubtful: list[np.ndarray] = []
        self.failures: list[Exception] = []


class Load:
    """Publishes at one service on a thread of its own, as fast as the service answers and as much as is permitted.

    counted: released with each output that is acknowledged."""

    def __init__(self, member: Member, seed: int, counted: threading.Semaphore) -> None:
        self._member, self._texts, self._counted = member, iter(outputs(seed, MOST)), counted
        self.published = Published()
        self.permits = threading.Semaphore(0)
        self.up = threading.Event()
        self._step = threading.Lock()  # held while an output is published
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self.up.is_set()

    def start(self) -> None:
        self._member.start()
        self.up.set()

    def kill(self) -> None:
        """Whatever it is doing; returns once its client has noticed."""
        self.up.clear()
        self._member.service.kill()
        with self._step:
            self._member.close()

    def end(self) -> None:
        self._ended = True
        self.permits.release()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.permits.acquire()
            self.up.wait()
            if self._ended:
                return
            with self._step:
                self._publish(next(self._texts))

    def _publish(self, text: np.ndarray) -> None:
        try:
            self._member.publish(text)
        except (DatastoreError, AssertionError) as error:
            self.published.doubtful.append(text)
            if self.up.is_set():
                self.published.failures.append(error)
        else:
            self.published.acknowledged.append(text)
            self._counted.release()


class Server:
    """The server, as what can be killed."""

    def __init__(self, share: ShareServer) -> None:
        self._share, self.running = share, True

    def start(self) -> None:
        self._share.start()
        self.running = True

    def kill(self) -> None:
        self._share.kill()
        self.running = False


@pytest.mark.parametrize("services", [2, 3])
def test_kills_under_load_lose_nothing_and_double_nothing(services, share, members, pytestconfig, capsys):
    """Fifty kills in the long run. One part or several are down at a time, the server among them; one service is up."""
    started = [members(f"service{i}") for i in range(services)]
    for member in started:
        member.client()  # from now on it has the namespace
    counted = threading.Semaphore(0)
    loads = [Load(member, 1 + i, counted) for i, member in enumerate(started)]
    for load in loads:
        load.up.set()
    kills = 50 if pytestconfig.getoption("--long") else 4
    killed = _disturb(loads, Server(share), counted, kills)
    for load in loads:
        load.end()
    for last, member in zip(outputs(0, services), started, strict=True):
        member.publish(last)
    _check(started, [load.published for load in loads], outputs(0, services))
    sent = _numbers(share)
    assert len(sent) == len(set(sent))
    with capsys.disabled():
        print(
            f"\n{services} services: {killed} kills of the server, {kills - killed} of services; {_told(loads)}"
        )


def _disturb(loads: Sequence[Load], server: Server, counted: threading.Semaphore, kills: int) -> int:
    """Kills and starts parts in an order that a seed decides, each after a few outputs more. Returns how often the server was killed."""
    parts, chance, of_server = [server, *loads], np.random.default_rng(len(loads)), 0
    while kills:
        while counted.acquire(blocking=False):  # those of before
            pass
        for load in loads:
            load.permits.release(PERMITTED)
        for _ in range(chance.integers(1, PERMITTED)):
            counted.acquire()
        part = parts[chance.integers(len(parts))]
        if not part.running:
            part.start()
        elif part is server or sum(load.running for load in loads) > 1:
            part.kill()
            kills, of_server = kills - 1, of_server + (part is server)
    for part in parts:
        if not part.running:
            part.start()
    return of_server


def _check(members: Sequence[Member], published: Sequence[Published], last: np.ndarray) -> None:
    """last: of each service, what it published when all were up again: what it had before was sent before."""
    acknowledged = [text for each in published for text in each.acknowledged]
    doubtful = [text for each in published for text in each.doubtful]
    assert not [failure for each in published for failure in each.failures]
    kept = set()
    for member in members:
        eventually(lambda member=member: all(member.held(list(last))), "the last outputs have not come")
        lost = [i for i, held in enumerate(member.held(acknowledged)) if not held]
        assert not lost, f"{len(lost)} of {len(acknowledged)} acknowledged outputs are not there"
        found = member.held(doubtful)
        kept.add(tuple(found))
        held = len(acknowledged) + sum(found) + len(last)
        assert member.tokens() == held * LENGTH, f"{member.tokens() / LENGTH} outputs, not {held}"
    assert len(kept) == 1, "an output that was not acknowledged is at some services alone"


def _numbers(share: ShareServer) -> list[tuple[int, int]]:
    """Origin and number of each output in the stream."""
    texts: Iterator[np.ndarray] = (
        provenance_in(fields) for _, fields in share.client.xrange(keys_of(NAMESPACE).texts)
    )
    return [
        (int(origin), int(number))
        for origin, number in np.concatenate([*texts, np.zeros(0, PROVENANCE)])[["origin", "number"]]
    ]


def _told(loads: Sequence[Load]) -> str:
    acknowledged, doubtful = (
        sum(len(getattr(load.published, kind)) for load in loads) for kind in ("acknowledged", "doubtful")
    )
    return f"{acknowledged} outputs acknowledged, {doubtful} not"
