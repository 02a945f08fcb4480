"""Why a service could not be asked, in words for who runs the client. gRPC's own text names its parts and their sources."""

from __future__ import annotations

import grpc

_OTHER_HTTP = "Received http2 header"  # of a server or a proxy that knows no gRPC
_SIGNS = {
    "Connection refused": "connection refused",
    "No such file or directory": "there is no such socket",
    "SETTINGS frame as the first frame, got frame type 79": "speaks HTTP/1: is this the metrics port?",
    "http1.x": "speaks HTTP/1: is this the metrics port?",
    "SETTINGS frame": "speaks another protocol",
    _OTHER_HTTP: "speaks HTTP/2 without gRPC",
    "errors resolving": "unknown host",
    "WRONG_VERSION_NUMBER": "speaks no TLS",
    "CERTIFICATE_VERIFY_FAILED": "TLS: its certificate is signed by another authority",
    "Hostname Verification": "TLS: its certificate is of another host",
    "Socket closed": "closed the connection: does it want TLS, or a client's certificate?",
}


def unreachable(error: grpc.RpcError) -> str:
    """Why no datastore answered at all, "" if one did."""
    details = error.details() or ""
    if error.code() is not grpc.StatusCode.UNAVAILABLE and _OTHER_HTTP not in details:
        return ""
    return next((words for sign, words in _SIGNS.items() if sign in details), details)


def why_failed(error: grpc.RpcError) -> str:
    """Why a call has failed."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    return unreachable(error) or error.details() or error.code().name
