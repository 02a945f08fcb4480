"""Sends text to the services from which another instance will get drafts."""

from __future__ import annotations

from collections.abc import Sequence

from datastore_service.client.affinity import affinity_key, ranked
from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Entry


class Postbox:
    """Posts each session's opening to the service to which an instance with the same endpoints assigns the session. It
    keeps nothing: what is posted while no service is connected is lost.

    streams: by endpoint. Calls come from one thread."""

    def __init__(self, streams: dict[str, GrpcDatastore]) -> None:
        self._streams = streams

    def post(self, openings: Sequence[Entry]) -> None:
        """Never blocks on a service and never raises DatastoreError."""
        for entry in openings:
            for endpoint in ranked(affinity_key(entry, entry.opening), self._streams):
                if not self._streams[endpoint].disconnect_reason:
                    self._streams[endpoint].post([entry])
                    break

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
