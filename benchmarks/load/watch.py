"""Looks at the service, at the clients and at the machine while a load runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from datastore_service.protocol.tree import Tier
from datastore_service.storage.segment_file import SUFFIX
from tests.support.servers.datastore import DatastoreService

WATCH_SECONDS = 1.0


class Watch:
    """Takes a sample now and one a second until the end of the `with` block, where it takes the last.

    data: the service's directory. Its live segments are numbered in the order of writing, so the highest number says how many
    the live tier has sealed and merged."""

    def __init__(self, service: DatastoreService, clients: Sequence[int], data: Path) -> None:
        self._service, self._data = service, data
        self._process, self._clients = psutil.Process(service.pid), [psutil.Process(pid) for pid in clients]
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._before = self._processor_seconds()
        self.written = 0
        self.samples: list[dict] = []

    def __enter__(self) -> Watch:
        psutil.cpu_percent()  # the next call tells of the time since this one
        self.samples.append(self._sample())
        self._thread.start()
        return self

    def __exit__(self, failure: object, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if failure is None:  # else the service may be gone
            self.samples.append(self._sample())

    @property
    def cores(self) -> dict[str, float]:
        """What service and clients used on average, in processors, and the machine's busy share, 0 to 1. After the block."""
        busy = [sample["machine_busy"] for sample in self.samples[1:]]
        seconds = self.samples[-1]["seconds"]
        service, clients = (
            (now - before) / seconds
            for now, before in zip(self._processor_seconds(), self._before, strict=True)
        )
        return {
            "service_cores": service, "client_cores": clients, "machine_busy": sum(busy) / len(busy),
            "cores": psutil.cpu_count() or 1,
        }  # fmt: skip

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_SECONDS):
            self.samples.append(self._sample())

    def _sample(self) -> dict:
        self.written = max([self.written, *(int(path.stem) for path in self._data.glob(f"live/*/*{SUFFIX}"))])
        stats = self._service.stats()
        tiers = [tier for namespace in stats.namespaces for tier in namespace.tiers if tier.tier == Tier.LIVE]
        return {
            "seconds": time.monotonic() - self._began,
            "resident_bytes": self._process.memory_info().rss,
            "machine_busy": psutil.cpu_percent() / 100,
            "live_tokens": sum(tier.tokens for tier in tiers),
            "live_segments": sum(tier.segments for tier in tiers),
            "segments_written": self.written,
            "sessions": sum(namespace.sessions for namespace in stats.namespaces),
            "streams": stats.streams,
        }

    def _processor_seconds(self) -> tuple[float, float]:
        """So far, of the service and of all clients."""
        service, *clients = (sum(process.cpu_times()[:2]) for process in (self._process, *self._clients))
        return service, sum(clients)
