"""File descriptors of the process: connections take at most half of them, so files can always be opened."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

MOST = 1 << 16  # that are asked for
SPARE_CONNECTIONS = 16  # beside the streams: admin and health calls


def raise_limit() -> None:
    """Raises the process's soft limit as far as the hard one permits; many systems begin with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(MOST, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections(streams: int) -> int:
    """How many connections the gRPC port may have open; a further one is closed at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = soft // 2
    if connections < streams + SPARE_CONNECTIONS:
        log.warning(
            "the limit of open files leaves fewer connections than streams; raise it (ulimit -n)",
            extra={"files": soft, "connections": connections, "streams": streams},
        )
    return connections
