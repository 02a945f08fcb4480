"""One name for a request's session on the instance that prefills it and on the one that decodes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

from datastore_service.protocol.names import bounded_name

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def shared_session(req: Req) -> str | None:
    """Made from what the router gave to both instances: the prefill instance's address and a number drawn for the
    request. None for an instance's own warm-up requests, which no other instance sees."""
    if req.bootstrap_room is None or req.bootstrap_host == FAKE_BOOTSTRAP_HOST:
        return None
    return bounded_name(f"{req.bootstrap_host}:{req.bootstrap_port}/{req.bootstrap_room}")
