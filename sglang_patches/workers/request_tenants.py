"""The tenant of a request, where the operator lets requests name theirs (`--specstore-request-tenant`).

A header's value goes into the request's `custom_params`, which reach the scheduler. SGLang's prefix cache is divided by tenant too: a
prompt that another tenant has sent would have its first token sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_patches import hooks
from sglang_patches.options import load_options
from sglang_patches.versions import host

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import ServerArgs
    from starlette.requests import Request

MOST_BYTES = 256  # of a name, as in a namespace
FIELD = "custom_params.specstore.tenant"
HEADER = "header:"
FLAG = "--specstore-request-tenant"

_source = ""  # the option's value, in the process that answers requests


def _before_request(
    manager: TokenizerManager, obj: object, request: Request | None = None, *_: object, **__: object
) -> None:
    """Called for each call of an API, after SGLang has made lists of a batch's fields; again without a request for further samples."""
    if not isinstance(obj, GenerateReqInput):
        return
    single = getattr(obj, "is_single", True)  # SGLang does not say so of a further sample
    given = [obj.sampling_params] if single else obj.sampling_params
    tenants = [_named(sampling) for sampling in given]
    if not _source:
        if any(tenants):
            raise ValueError(f"{FIELD}: this server takes no tenants from requests ({FLAG})")
        return
    if request is not None and _source.startswith(HEADER):
        tenants = [_from_header(request, _source.removeprefix(HEADER), tenant) for tenant in tenants]
        named = list(map(_naming, given, tenants))
        obj.sampling_params = named[0] if single else named
    keys = _cache_keys([obj.extra_key] if single else obj.extra_key, tenants)
    obj.extra_key = keys[0] if single else keys


def _named(sampling: dict[str, Any]) -> str:
    """The tenant in `custom_params`, "" for none. Raises ValueError for anything but a name."""
    custom = _object(sampling.get("custom_params"), "custom_params")
    return _checked(_object(custom.get("specstore"), "custom_params.specstore").get("tenant", ""), FIELD)


def _object(value: object, field: str) -> dict[str, Any]:
    if not isinstance(value or {}, dict):
        raise ValueError(f"{field}: {value!r} is not an object")
    return value or {}  # type: ignore[return-value]


def _checked(tenant: object, field: str) -> str:
    if not isinstance(tenant, str):
        raise ValueError(f"{field}: {tenant!r} is not a string")
    if len(tenant.encode()) > MOST_BYTES:
        raise ValueError(f"{field}: {len(tenant.encode())} bytes exceeds {MOST_BYTES}")
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


def _naming(sampling: dict[str, Any], tenant: str) -> dict[str, Any]:
    """These sampling parameters with the tenant. A batch's requests may share one object."""
    if not tenant:
        return sampling
    custom = sampling.get("custom_params") or {}
    wishes = custom.get("specstore") or {}
    return sampling | {"custom_params": custom | {"specstore": wishes | {"tenant": tenant}}}


def _cache_keys(given: list[str | None] | None, tenants: list[str]) -> list[str]:
    """Requests share cached prompts only if their `extra_key` is the same. The length keeps a client from writing another's."""
    given = given or [None] * len(tenants)
    return [f"{len(tenant)}:{tenant}:{key or ''}" for tenant, key in zip(tenants, given, strict=True)]


HOOKS: dict[str, Callable] = {host.REQUEST_STATE: _before_request}


def register(server_args: ServerArgs) -> None:
    """For the process that answers requests. Raises ValueError for a setting with which requests would not pass through it."""
    global _source
    _source = load_options().request_tenant
    if _source:
        _refuse_ways_around(resolved_view(server_args))
    hooks.register(HOOKS, HookType.BEFORE)
    hooks.refuse_if_left_out()
    HookRegistry.apply_hooks()


def _refuse_ways_around(view: ServerArgs) -> None:
    if view.tokenizer_worker_num > 1:
        raise ValueError(f"{FLAG}: not with --tokenizer-worker-num above 1")
    if envs.SGLANG_RUST_SERVER.get():
        raise ValueError(f"{FLAG}: not with SGLang's Rust server (SGLANG_RUST_SERVER)")
    if view.grpc_port is not None:
        raise ValueError(f"{FLAG}: not with SGLang's gRPC server (--grpc-port)")
