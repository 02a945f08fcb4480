"""What a request says in `custom_params.specstore`, its wishes: checked where it enters, and added to on its way to the scheduler.

The operator says which of them requests may have (`--specstore-request-wishes`).
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from datastore_service.protocol.names import MAX_NAME_BYTES, bounded_name
from datastore_service.protocol.types import MAX_PRIORS
from sglang_patches.ledger.requests import DraftSource
from sglang_patches.options import load_options

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput

FIELD = "custom_params.specstore"
FLAG = "--specstore-request-wishes"


class Wish(NamedTuple):
    """What a wish must be. title: for clients."""

    title: str
    fits: Callable[[Any], bool]


def _is_name(value: object) -> bool:
    """Whether a datastore takes it as a name as it is."""
    return isinstance(value, str) and bounded_name(value) == value


_NAME = Wish("a string", lambda value: isinstance(value, str))
_SWITCH = Wish("true or false", lambda value: isinstance(value, bool))
_COUNT = Wish("a whole number of at least 0", lambda value: type(value) is int and value >= 0)
_TEXTS = Wish("a string or a list of strings", lambda value: isinstance(value, (str, list)))
_SOURCES = Wish(
    f"true, false or a list of {', '.join(DraftSource)}",
    lambda value: (
        isinstance(value, bool)
        or (isinstance(value, list) and all(map(tuple(DraftSource).__contains__, value)))
    ),
)
_PRIORS = Wish(
    f"a list of at most {MAX_PRIORS} names of 1 to {MAX_NAME_BYTES} bytes",
    lambda value: isinstance(value, list) and len(value) <= MAX_PRIORS and all(map(_is_name, value)),
)
_SHARED = Wish(f"a name of 1 to {MAX_NAME_BYTES} bytes", _is_name)
WISHES = {
    "conversation": _NAME,
    "draft": _SOURCES,
    "group": _SHARED,
    "nodes": _COUNT,
    "priors": _PRIORS,
    "publish": _SWITCH,
    "reference": _TEXTS,
    "sources": _SWITCH,
    "user": _NAME,
    "workspace": _SHARED,
}
OF_A_SERVICE = ("priors", "workspace")  # an embedded datastore has none
TENANT = "tenant"  # a wish too; `--specstore-request-tenant` says whether requests may have it

# In the process that answers requests: of the option, and whether there is a service.
_permitted: frozenset[str] = frozenset(WISHES)
_embedded = False


def is_further_sample(obj: GenerateReqInput) -> bool:
    """Whether this is no call of an API, but one more sample of a request that has entered."""
    return not hasattr(obj, "is_single")  # SGLang sets it for a call


def is_single(obj: GenerateReqInput) -> bool:
    """Whether a call of an API is one request, and its fields are no lists."""
    return is_further_sample(obj) or obj.is_single


def wishes_of(obj: GenerateReqInput) -> list[dict[str, Any]]:
    """The wishes of each request of a call. Raises ValueError for a wish of another name or type, and for one that requests may not have."""
    wishes = [_wishes(sampling) for sampling in _samplings(obj)]
    if not is_further_sample(obj):  # those have what was added
        for name in {name for of_request in wishes for name, wish in of_request.items() if wish is not None}:
            refuse_unless_permitted(name, f"{FIELD}.{name}")
    return wishes


def refuse_unless_permitted(name: str, field: str) -> None:
    """Raises ValueError if the operator lets no request have the wish. field: in which a client has given it."""
    if name in WISHES and name not in _permitted:
        raise ValueError(f"{field}: this server takes no wish {name!r} from requests ({FLAG})")
    if name in OF_A_SERVICE and _embedded:
        raise ValueError(f"{field}: an embedded datastore has none (--specstore-endpoint)")


def give(obj: GenerateReqInput, name: str, values: Sequence[str]) -> None:
    """Adds a wish to each request of a call. A batch's requests may share one object, so new ones are made.

    values: of the wish, by request; "" adds none.
    """
    given = [
        _with(sampling, name, value) if value else sampling
        for sampling, value in zip(_samplings(obj), values, strict=True)
    ]
    obj.sampling_params = given[0] if is_single(obj) else given


def object_of(value: object, field: str) -> dict[str, Any]:
    """What a client wrote, as an object; a null is an empty one. Raises ValueError that names the field."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{field}: {reprlib.repr(value)} is not an object")
    return value


def _samplings(obj: GenerateReqInput) -> list[dict[str, Any]]:
    return [obj.sampling_params] if is_single(obj) else obj.sampling_params


def _wishes(sampling: dict[str, Any]) -> dict[str, Any]:
    wishes = object_of(object_of(sampling.get("custom_params"), "custom_params").get("specstore"), FIELD)
    for name, value in wishes.items():
        _check(name, value)
    if wishes.get("workspace") is not None and wishes.get("publish") is False:
        raise ValueError(f"{FIELD}.workspace: not with publish: false, which is not to be remembered")
    return wishes


def _check(name: str, value: object) -> None:
    """A null stands for a wish that is not given."""
    wish = _NAME if name == TENANT else WISHES.get(name)
    if wish is None:
        raise ValueError(f"{FIELD}: {reprlib.repr(name)} is none of {', '.join([*WISHES, TENANT])}")
    if value is not None and not wish.fits(value):
        raise ValueError(f"{FIELD}.{name}: {reprlib.repr(value)} is not {wish.title}")


def _with(sampling: dict[str, Any], name: str, value: str) -> dict[str, Any]:
    custom = sampling.get("custom_params") or {}
    wishes = custom.get("specstore") or {}
    return sampling | {"custom_params": custom | {"specstore": wishes | {name: value}}}


def register() -> None:
    """For the process that answers requests. Raises ValueError for an option that names no wish."""
    global _permitted, _embedded
    options = load_options()
    _permitted, _embedded = frozenset(options.permitted_wishes), options.embedded
    if unknown := _permitted - WISHES.keys():
        raise ValueError(f"{FLAG}: {min(unknown)!r} is none of {', '.join(WISHES)}")
