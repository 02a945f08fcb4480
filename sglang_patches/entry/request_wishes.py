"""What a request says in `custom_params.specstore`, its wishes: checked where it enters, and added to on its way to the scheduler."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput

FIELD = "custom_params.specstore"
# Their types, as Python and as a client has them.
_NAME, _SWITCH = ((str,), "a string"), ((bool,), "true or false")
_COUNT, _TEXTS = ((int,), "a whole number of at least 0"), ((str, list), "a string or a list of strings")
WISHES = {
    "conversation": _NAME,
    "draft": _SWITCH,
    "nodes": _COUNT,
    "publish": _SWITCH,
    "reference": _TEXTS,
    "sources": _SWITCH,
    "tenant": _NAME,
}


def is_single(obj: GenerateReqInput) -> bool:
    """Whether a call of an API is one request, and its fields are no lists."""
    return getattr(obj, "is_single", True)  # SGLang does not say so of a further sample


def wishes_of(obj: GenerateReqInput) -> list[dict[str, Any]]:
    """The wishes of each request of a call. Raises ValueError for a wish of another name or type."""
    return [_wishes(sampling) for sampling in _samplings(obj)]


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
    return wishes


def _check(name: str, value: object) -> None:
    """A null stands for a wish that is not given."""
    if name not in WISHES:
        raise ValueError(f"{FIELD}: {reprlib.repr(name)} is none of {', '.join(WISHES)}")
    kinds, title = WISHES[name]
    if value is not None and (type(value) not in kinds or (isinstance(value, int) and value < 0)):
        raise ValueError(f"{FIELD}.{name}: {reprlib.repr(value)} is not {title}")


def _with(sampling: dict[str, Any], name: str, value: str) -> dict[str, Any]:
    custom = sampling.get("custom_params") or {}
    wishes = custom.get("specstore") or {}
    return sampling | {"custom_params": custom | {"specstore": wishes | {name: value}}}
