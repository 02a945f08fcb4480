"""The hook through which each request of an API passes: its wishes are checked, and it gets its tenant, its conversation and its user."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.plugins.hook_registry import HookType
from starlette.requests import HTTPConnection

from sglang_patches.entry import request_conversations, request_tenants, request_users, request_wishes
from sglang_patches.entry.request_wishes import wishes_of
from sglang_patches.host import hooks
from sglang_patches.host.versions import host
from sglang_patches.options import load_options

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import ServerArgs
    from starlette.requests import Request


_own_tenant = ""  # of the server, in the process that answers requests


def _before_request(
    manager: TokenizerManager, obj: object, request: Request | None = None, *_: object, **__: object
) -> None:
    """Called for each call of an API, after SGLang has made lists of a batch's fields; again without a request for further samples."""
    if not isinstance(obj, GenerateReqInput):
        return
    wishes = wishes_of(obj)
    tenants = request_tenants.enter(obj, request, wishes)
    owners = [tenant or _own_tenant for tenant in tenants]
    http = (
        request if isinstance(request, HTTPConnection) else None
    )  # SGLang's gRPC server has clients' names in no request
    request_conversations.enter(obj, http, wishes, owners)
    request_users.enter(obj, http, wishes, owners)


HOOKS: hooks.ByKind = {HookType.BEFORE: {host.REQUEST_STATE: _before_request}}


def register(server_args: ServerArgs) -> None:
    """For the process that answers requests. Raises ValueError for a wish that there is not, and for a setting with which a request's
    tenant would not be seen."""
    global _own_tenant
    _own_tenant = load_options().tenant
    request_wishes.register()
    request_tenants.register(server_args)
    request_conversations.register()
    hooks.apply(HOOKS)
