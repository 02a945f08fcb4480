"""The user of a request, by the name that its client gives in OpenAI's fields, so that `specstore forget` can find the user's text.

The name becomes a digest within its tenant before it leaves this process: names can tell of persons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from datastore_service.protocol.names import hashed_name
from sglang_patches.entry.request_conversations import read
from sglang_patches.entry.request_wishes import give

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput
    from starlette.requests import Request

SOURCES = ("body:user", "body:safety_identifier")  # the second has taken the first one's place at OpenAI


def enter(
    obj: GenerateReqInput, request: Request | None, wishes: Sequence[dict[str, Any]], owners: Sequence[str]
) -> None:
    """Gives a call's requests their user. One that names a user among its wishes keeps that.

    wishes: of each request. owners: the tenant of each."""
    named = [] if request is None else [read(request, source) for source in SOURCES]
    user = next((name for name in named if isinstance(name, str) and name), None)
    if user is not None:
        names = [
            "" if wish.get("user") is not None else hashed_name(owner, user)
            for wish, owner in zip(wishes, owners, strict=True)
        ]
        give(obj, "user", names)
