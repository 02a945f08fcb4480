"""Opens the gRPC channels of all clients."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from datastore_service.endpoint import parse_endpoint
from datastore_service.tls import Tls

# What a proxy of the environment (http_proxy, grpc_proxy and so on) would read: a datastore is reached directly.
_DIRECT = (("grpc.enable_http_proxy", 0),)


def open_channel(
    endpoint: str, tls: Tls | None = None, options: Sequence[tuple[str, int]] = ()
) -> grpc.Channel:
    """Opens a channel to a service, through no proxy. Raises ValueError for a malformed endpoint.

    endpoint: "HOST:PORT" or "unix:PATH".
    tls: None for plain text. With TLS the service's certificate must name HOST ("localhost" for a socket)."""
    target = parse_endpoint(endpoint).target
    options = (*_DIRECT, *options)
    if tls is None:
        return grpc.insecure_channel(target, options=options)
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
    return grpc.secure_channel(target, credentials, options=options)
