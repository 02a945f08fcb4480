"""The tenant of a request, where the operator lets requests name theirs (`--specstore-request-tenant`).

A header's value goes into the request's `custom_params`, which reach the scheduler. Whatever else of SGLang leads to earlier text is divided
by tenant too. A prompt that another tenant has sent would have its first token sooner, and a session is the text of its requests.
"""

from __future__ import annotations

import reprlib
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookType

from datastore_service.protocol.names import of_tenant
from sglang_patches.entry.request_wishes import give, is_single, object_of
from sglang_patches.host import hooks
from sglang_patches.options import load_options

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import CloseSessionReqInput, GenerateReqInput, OpenSessionReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import ServerArgs
    from starlette.requests import Request

MOST_BYTES = 256  # of a name, as in a namespace
FIELD = "custom_params.specstore.tenant"
HEADER = "header:"
# Fields that would bring another's image or cached text by its hash.
NOT_DIVIDED = ("mm_hashes", "mm_content_hashes", "kv_hints")
FLAG = "--specstore-request-tenant"

_source = ""  # the option's value, in the process that answers requests


def enter(obj: GenerateReqInput, request: Request | None, wishes: Sequence[dict[str, Any]]) -> list[str]:
    """Divides a call of an API by tenant. Returns each of its requests' tenant, "" for the server's own. Raises ValueError for what is no
    name, or none that this caller may give.

    wishes: of each request.
    """
    tenants = [_checked(wish.get("tenant") or "", FIELD) for wish in wishes]
    if not _source:
        if any(tenants):
            raise ValueError(f"{FIELD}: this server takes no tenants from requests ({FLAG})")
        return tenants
    if request is not None and _source.startswith(HEADER):
        tenants = [_from_header(request, _source.removeprefix(HEADER), tenant) for tenant in tenants]
        give(obj, "tenant", tenants)
    _divide(obj, tenants)
    return tenants


def _divide(obj: GenerateReqInput, tenants: list[str]) -> None:
    """What of SGLang leads to earlier text."""
    keys = _cache_keys([obj.extra_key] if is_single(obj) else obj.extra_key, tenants)
    obj.extra_key = keys[0] if is_single(obj) else keys
    for field in NOT_DIVIDED:
        if any(_listed(getattr(obj, field, None))):
            raise ValueError(
                f"{field}: not on a server whose requests name tenants, which it does not divide"
            )
    if obj.session_params is not None or obj.session_id is not None:
        _enter_own_session(obj, set(tenants))


def _checked(tenant: str, field: str) -> str:
    try:
        size = len(tenant.encode())
    except UnicodeEncodeError:  # JSON can hold half of a surrogate pair
        raise ValueError(f"{field}: {reprlib.repr(tenant)} is not Unicode") from None
    if size > MOST_BYTES:
        raise ValueError(f"{field}: {size} bytes exceeds {MOST_BYTES}")
    return tenant


def _from_header(request: Request, name: str, named: str) -> str:
    if named:
        raise ValueError(f"{FIELD}: the tenant is that of the header {name}")
    values = request.headers.getlist(name)
    if len(values) > 1:  # a gateway has added its own to a client's
        raise ValueError(f"{name}: given {len(values)} times")
    return _checked(_decoded(values[0], name), name) if values else ""


def _decoded(value: str, name: str) -> str:
    """The text of a header, of which Starlette makes a character a byte."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise ValueError(f"{name}: not UTF-8") from None


def _cache_keys(given: list[str | None] | None, tenants: list[str]) -> list[str]:
    """Requests share cached prompts only if their `extra_key` is the same."""
    given = given or [None] * len(tenants)
    return [of_tenant(tenant, key or "") for tenant, key in zip(tenants, given, strict=True)]


def _listed(value: object) -> list:
    return value if isinstance(value, list) else [value]


def _enter_own_session(obj: GenerateReqInput, tenants: set[str]) -> None:
    """A session is the text of its earlier requests."""
    if len(tenants) > 1:
        raise ValueError("session_params: one session for requests of several tenants")
    (tenant,) = tenants
    if obj.session_id is not None:
        obj.session_id = of_tenant(tenant, _string(obj.session_id, "session_id"))
    if obj.session_params is not None:
        params = object_of(obj.session_params, "session_params")
        if "id" in params:
            obj.session_params = params | {
                "id": of_tenant(tenant, _string(params["id"], "session_params.id"))
            }


def _string(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{field}: {value!r} is not a string")
    return value


async def _around_open_session(
    original: Callable, manager: TokenizerManager, obj: OpenSessionReqInput, request: Request | None = None
) -> str | None:
    name = uuid.uuid4().hex if obj.session_id is None else obj.session_id
    obj.session_id = of_tenant(_caller(request), name)
    opened = await original(manager, obj, request)
    return None if opened is None else name


async def _around_close_session(
    original: Callable, manager: TokenizerManager, obj: CloseSessionReqInput, request: Request | None = None
) -> None:
    obj.session_id = of_tenant(_caller(request), obj.session_id)
    await original(manager, obj, request)


def _caller(request: Request | None) -> str:
    """The tenant that opens or closes a session. Only a header can name one there."""
    if request is None or not _source.startswith(HEADER):
        return ""
    return _from_header(request, _source.removeprefix(HEADER), "")


_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin."
SESSION_HOOKS: hooks.ByKind = {
    HookType.AROUND: {
        _CONTROL + "open_session": _around_open_session,
        _CONTROL + "close_session": _around_close_session,
    }
}


def register(server_args: ServerArgs) -> None:
    """For the process that answers requests. Raises ValueError for a setting with which requests would not pass through it."""
    global _source
    _source = load_options().request_tenant
    if _source:
        _refuse_ways_around(resolved_view(server_args))
        hooks.apply(SESSION_HOOKS)


def _refuse_ways_around(view: ServerArgs) -> None:
    if envs.SGLANG_RUST_SERVER.get():
        raise ValueError(f"{FLAG}: not with SGLang's Rust server (SGLANG_RUST_SERVER)")
    if view.grpc_port is not None:
        raise ValueError(f"{FLAG}: not with SGLang's gRPC server (--grpc-port)")
    if getattr(view, "enable_response_store", False):  # SGLang 0.5.17 has no such setting
        raise ValueError(f"{FLAG}: not with --enable-response-store, whose responses belong to no tenant")
