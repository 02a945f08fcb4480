"""`open_datastore` opens a datastore wherever it runs: in this process or behind gRPC."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from datastore_service.client.access import Access, AccessSource, open_access, read_token
from datastore_service.client.base import Datastore, DatastoreError, NoTexts, Texts
from datastore_service.endpoint import FORMS, parse_endpoints
from datastore_service.protocol.types import Namespace
from datastore_service.storage.fingerprint import tokenizer_fingerprint

if TYPE_CHECKING:
    from datastore_service.client.postbox import Postbox

__all__ = [
    "Access",
    "Datastore",
    "DatastoreError",
    "NoTexts",
    "Texts",
    "check_prior",
    "open_datastore",
    "open_postbox",
    "read_token",
    "tokenizer_fingerprint",
]

log = logging.getLogger(__name__)

EMBEDDED = "embedded"
NO_TEXTS = NoTexts()
GREETING_SECONDS = 2.0  # how long a start waits for the services before it continues without them


def check_prior(directory: str) -> None:
    """Reads a prior's manifest. Raises ValueError that names the file and the field at fault."""
    from datastore_service.storage.errors import StorageError
    from datastore_service.storage.manifest import read_manifest

    try:
        read_manifest(directory)
    except StorageError as error:
        raise ValueError(str(error)) from None


def open_datastore(
    endpoint: str,
    namespace: Namespace,
    vocab_size: int,
    prior: str | None = None,
    access: AccessSource = open_access,
    tenants: bool = False,
    texts: Texts = NO_TEXTS,
) -> Datastore:
    """The datastore at `endpoint`: "embedded", "embedded:DIR" (with the prior in DIR), "HOST:PORT" or "unix:PATH". Several
    of the latter two, separated by commas, share the sessions.

    vocab_size: token ids are smaller. prior: the directory, if `endpoint` is plain "embedded". access: what to show to a service, asked for each stream. tenants: whether entries name tenants, whose texts are then kept apart; those of an entry that
    names none belong to `namespace`. texts: what the sessions were told with; without them a service that has lost a session is not
    told of it again.
    A service need not be running yet: until it answers, drafts come from the sessions alone.
    Raises ValueError naming a malformed argument or what this processor lacks for an image's kernels, StorageError if the prior
    cannot be read or was built with another tokenizer.
    """
    from datastore_service.engine.processor import check_processor

    check_processor()
    if vocab_size < 1:
        raise ValueError(f"vocab_size: {vocab_size} is less than 1")
    kind, _, directory = endpoint.partition(":")
    if kind == EMBEDDED:
        if access() != Access():
            raise ValueError("access: an embedded datastore has no connection")
        return _open_embedded(directory or prior, namespace, vocab_size)
    if prior:
        raise ValueError(f"prior: the service at {endpoint} has its own")
    try:
        endpoints = parse_endpoints(endpoint)
    except ValueError as error:
        raise ValueError(
            f'{error} (or "embedded", "embedded:DIR")' if FORMS in str(error) else str(error)
        ) from None
    return _open_services(endpoints, namespace, vocab_size, access, tenants, texts)


def open_postbox(
    endpoint: str,
    namespace: Namespace,
    access: AccessSource = open_access,
    tenants: bool = False,
) -> Postbox:
    """For a sender of text to the services at `endpoint` (as above, but not embedded) that needs no drafts. Raises
    ValueError for a malformed endpoint."""
    from datastore_service.client.postbox import Postbox
    from datastore_service.client.remote import GrpcDatastore

    return Postbox(
        {name: GrpcDatastore(name, namespace, access, tenants=tenants) for name in parse_endpoints(endpoint)}
    )


# gRPC and the engine's compiled code are imported when a datastore is opened. A process that only uses the types, or that
# forks after importing this module, loads neither.


def _open_embedded(directory: str | None, namespace: Namespace, vocab_size: int) -> Datastore:
    from datastore_service.client.embedded import EmbeddedDatastore
    from datastore_service.engine.engine import Engine
    from datastore_service.storage.manifest import open_segments

    prior = open_segments(directory, namespace.tokenizer) if directory else ()
    return EmbeddedDatastore(lambda: Engine(vocab_size, prior))


def _open_services(
    endpoints: Iterable[str],
    namespace: Namespace,
    vocab_size: int,
    access: AccessSource,
    tenants: bool,
    texts: Texts,
) -> Datastore:
    from datastore_service.client.link import Link
    from datastore_service.client.remote import GrpcDatastore
    from datastore_service.client.resilient import ResilientDatastore
    from datastore_service.engine import tree_check
    from datastore_service.engine.engine import Engine

    tree_check.load()
    streams = {
        endpoint: GrpcDatastore(endpoint, namespace, access, vocab_size, tenants) for endpoint in endpoints
    }
    until = time.monotonic() + GREETING_SECONDS
    for endpoint, stream in streams.items():
        if not stream.wait_connected(max(0.0, until - time.monotonic())):
            log.warning("datastore %s: not there yet (%s)", endpoint, stream.disconnect_reason)
    links = [Link(endpoint, stream) for endpoint, stream in streams.items()]
    return ResilientDatastore(links, Engine(vocab_size), texts)
