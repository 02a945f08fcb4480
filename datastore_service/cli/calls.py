"""The channel of the commands that ask a running service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from datastore_service.cli.options import ENDPOINT_VARIABLE, TOKEN_VARIABLE
from datastore_service.client import Access, DatastoreError
from datastore_service.client.channel import open_channel
from datastore_service.client.reasons import unreachable, why_failed


@contextmanager
def open_service(endpoint: str, access: Access, token_source: str = "") -> Iterator[grpc.Channel]:
    """A channel; a call that fails in the block raises DatastoreError in one line. token_source: where the token is from, if
    there is one."""
    with open_channel(endpoint, access.tls) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise DatastoreError(_told(error, endpoint, token_source if access.token else "")) from error


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
    reason = (error.details() or "").removeprefix("authorization: ")
    if token_source:
        return f"the service does not take the token of {token_source}: {reason}"
    return f"the service asks who calls ({reason}): give --token-file or {TOKEN_VARIABLE}"
