"""The channel of the commands that ask a running service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from datastore_service.cli.options import ENDPOINT_VARIABLE, TOKEN_VARIABLE
from datastore_service.client import DatastoreError
from datastore_service.client.channel import open_channel
from datastore_service.client.reasons import unreachable, why_failed
from datastore_service.tls import Tls


@contextmanager
def open_service(endpoint: str, tls: Tls | None, token_source: str = "") -> Iterator[grpc.Channel]:
    """A channel; a call that fails in the block raises DatastoreError in one line. token_source: where the admin token is from, ""
    for none."""
    with open_channel(endpoint, tls) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise DatastoreError(_told(error, endpoint, token_source)) from error


def _told(error: grpc.RpcError, endpoint: str, token_source: str) -> str:
    if why := unreachable(error):
        question = "" if why.endswith("?") else "is 'specstore serve' running? "
        return (
            f"no datastore at {endpoint} ({why}); {question}--endpoint or {ENDPOINT_VARIABLE} names another"
        )
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"{endpoint}: {why_failed(error)}"
    if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
        return why_failed(error)  # the service's own words
    if token_source:
        return f"the service has another admin token than {token_source}"
    return f"the service asks for its admin token: give --admin-token-file or {TOKEN_VARIABLE}"
