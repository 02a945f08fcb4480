"""Sends text to where somebody else will ask for drafts from it."""

from __future__ import annotations

from collections.abc import Sequence

from datastore_service.client.affinity import affinity_key, ranked
from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Entry


class Postbox:
    """Posts each session's opening to the service that an instance with the same endpoints will look for it in. Keeps
    nothing: what is posted while no service is there is lost.

    streams: by endpoint. Calls come from one thread."""

    def __init__(self, streams: dict[str, GrpcDatastore]) -> None:
        self._streams = streams

    def post(self, openings: Sequence[Entry]) -> None:
        """Never blocks on a service and never raises DatastoreError."""
        for entry in openings:
            for endpoint in ranked(affinity_key(entry, entry.opening), self._streams):
                if not self._streams[endpoint].trouble:
                    self._streams[endpoint].post([entry])
                    break

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
