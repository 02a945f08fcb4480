"""One way to reach a datastore: `open_datastore`, wherever it runs."""

from __future__ import annotations

import logging

from datastore_service.client.base import Datastore, DatastoreError
from datastore_service.endpoint import FORMS, parse_endpoint
from datastore_service.engine.types import Namespace
from datastore_service.storage.fingerprint import tokenizer_fingerprint
from datastore_service.tls import Tls

__all__ = ["Datastore", "DatastoreError", "open_datastore", "open_stream", "tokenizer_fingerprint"]

log = logging.getLogger(__name__)

EMBEDDED = "embedded"
GREETING_SECONDS = 2.0  # how long a start waits for the service before it goes on without


def open_datastore(
    endpoint: str,
    namespace: Namespace,
    vocab_size: int,
    prior: str | None = None,
    tls: Tls | None = None,
) -> Datastore:
    """The datastore at `endpoint`: "embedded", "embedded:DIR" (with the prior in DIR), "HOST:PORT" or "unix:PATH".

    vocab_size: token ids are smaller. prior: the directory, where `endpoint` is plain "embedded". tls: what a service
    with TLS needs, None for one without.
    A service need not be there yet: until it answers, drafts come from the sessions alone.
    Raises ValueError naming the argument if one is malformed, StorageError
    if the prior cannot be read or was built with another tokenizer.
    """
    if vocab_size < 1:
        raise ValueError(f"vocab_size: {vocab_size} is less than 1")
    kind, _, directory = endpoint.partition(":")
    if kind == EMBEDDED:
        if tls:
            raise ValueError("tls: an embedded datastore has no connection")
        return _open_embedded(directory or prior, namespace, vocab_size)
    if prior:
        raise ValueError(f"prior: the service at {endpoint} has its own")
    try:
        parse_endpoint(endpoint)
    except ValueError as error:
        raise ValueError(
            f'{error} (or "embedded", "embedded:DIR")' if FORMS in str(error) else str(error)
        ) from None
    return _open_service(endpoint, namespace, vocab_size, tls)


def open_stream(endpoint: str, namespace: Namespace, tls: Tls | None = None) -> Datastore:
    """The service at `endpoint` alone, for who sends it text and asks for no drafts: what is posted while it is away is
    lost. Raises ValueError for an endpoint that is malformed."""
    from datastore_service.client.remote import GrpcDatastore

    return GrpcDatastore(endpoint, namespace, tls)


# gRPC and the engine's compiled code are imported when a datastore is opened: whoever only names the types, or forks
# after importing this, has neither.


def _open_embedded(directory: str | None, namespace: Namespace, vocab_size: int) -> Datastore:
    from datastore_service.client.embedded import EmbeddedDatastore
    from datastore_service.engine.engine import Engine
    from datastore_service.storage.manifest import open_segments

    prior = open_segments(directory, namespace.tokenizer) if directory else ()
    return EmbeddedDatastore(Engine(vocab_size, prior))


def _open_service(endpoint: str, namespace: Namespace, vocab_size: int, tls: Tls | None) -> Datastore:
    from datastore_service.client.remote import GrpcDatastore
    from datastore_service.client.resilient import ResilientDatastore
    from datastore_service.engine.engine import Engine

    primary = GrpcDatastore(endpoint, namespace, tls)
    if not primary.wait_connected(GREETING_SECONDS):
        log.warning(
            "datastore %s: not there yet (%s); drafting from the sessions alone", endpoint, primary.trouble
        )
    return ResilientDatastore(primary, Engine(vocab_size), vocab_size)
