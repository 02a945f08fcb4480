"""Messages to try a service with, made from the proto descriptors: new fields and methods need no word here.

Most values are *ordinary*, so that a message gets past the first checks; some are *odd*: at, beyond and far beyond what
any field may have. `broken` goes below that and spoils the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from dataclasses import astuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from datastore_service.engine.limits import Limits
from datastore_service.server.limits import ServiceLimits

Ordinary = dict[str, st.SearchStrategy]  # by name of a message or of a field

_PRESENT = (True, True, True, True, False)  # fields
_ODDNESS = (0, 0, 5, 30)  # per cent of a message's values that are odd
_MANY = (257, 1025, 65_537)  # one more than some field may have
_BOUNDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_LIMITS = [
    int(value)
    for limits in (ServiceLimits(), Limits())
    for value in astuple(limits)
    if value < math.inf  # ages, which have none unless one is set
]
_EDGES = sorted({limit + by for limit in (*_LIMITS, 2**16, 2**31, 2**32) for by in (-1, 0, 1)} | {-1})
_REALS = (float("nan"), float("inf"), float("-inf"), -1.0, -0.0, 1e308, 5e-324)
_STRINGS = (
    "", "x" * 256, "x" * 257, "é" * 129, "x" * 100_000, "\0", "a\nb\r\n", "../../etc", "/", "..", "/dev/null",
    "%s {0} \\", "\U0010ffff" * 64, "\u202e",
)  # fmt: skip


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, ordinary: Ordinary) -> Message:
    """ordinary: what the named messages and fields are filled with, where they are not odd."""
    return _message(draw, descriptor, ordinary, draw(st.sampled_from(_ODDNESS)))


def _message(draw: st.DrawFn, descriptor: Descriptor, ordinary: Ordinary, oddness: int) -> Message:
    if descriptor.name in ordinary and not _odd(draw, oddness):
        return draw(ordinary[descriptor.name])
    message = GetMessageClass(descriptor)()
    fields = [field for field in descriptor.fields if not field.containing_oneof]
    fields += [draw(st.sampled_from(list(oneof.fields))) for oneof in descriptor.oneofs]
    for field in fields:
        if draw(st.sampled_from(_PRESENT)):
            _fill(draw, message, field, ordinary, oddness)
    return message


def _fill(
    draw: st.DrawFn, message: Message, field: FieldDescriptor, ordinary: Ordinary, oddness: int
) -> None:
    def value(oddness: int = oddness) -> object:
        if field.message_type is not None:
            return _message(draw, field.message_type, ordinary, oddness)
        if _odd(draw, oddness):
            return draw(_odd_values(field))
        return draw(ordinary[field.name] if field.name in ordinary else _ordinary_values(field))

    if field.is_repeated and field.message_type and field.message_type.GetOptions().map_entry:
        for one in _several(draw, value, oddness):
            _put(getattr(message, field.name), one)
    elif field.is_repeated:
        getattr(message, field.name).extend(_several(draw, value, oddness))
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(value())
    else:
        setattr(message, field.name, value())


def _put(mapping: MutableMapping, pair: Message) -> None:
    """Puts the pair of a map's key and value into the map."""
    if isinstance(pair.value, Message):
        mapping[pair.key].CopyFrom(pair.value)
    else:
        mapping[pair.key] = pair.value


def _several(draw: st.DrawFn, value: Callable[..., object], oddness: int) -> list[object]:
    if _odd(draw, oddness):
        return [value(oddness=0)] * draw(st.sampled_from(_MANY))  # many of many would be gigabytes
    return [value() for _ in range(draw(st.integers(0, 4)))]


def _odd(draw: st.DrawFn, oddness: int) -> bool:
    return oddness > 0 and draw(st.integers(0, 99)) < oddness


def _ordinary_values(field: FieldDescriptor) -> st.SearchStrategy:
    if field.cpp_type in _BOUNDS:
        return st.integers(0, 20)
    return {
        FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
        FieldDescriptor.CPPTYPE_FLOAT: st.floats(0, 1, width=32),
        FieldDescriptor.CPPTYPE_DOUBLE: st.floats(0, 1),
        FieldDescriptor.CPPTYPE_ENUM: st.sampled_from(_numbers(field)),
        FieldDescriptor.CPPTYPE_STRING: _strings(field, st.sampled_from("abc")),
    }[field.cpp_type]


def _odd_values(field: FieldDescriptor) -> st.SearchStrategy:
    if field.cpp_type in _BOUNDS:
        low, high = _BOUNDS[field.cpp_type]
        return st.sampled_from([edge for edge in (*_EDGES, low, high) if low <= edge <= high])
    return {
        FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
        FieldDescriptor.CPPTYPE_FLOAT: st.sampled_from(_REALS),
        FieldDescriptor.CPPTYPE_DOUBLE: st.sampled_from(_REALS),
        FieldDescriptor.CPPTYPE_ENUM: st.sampled_from((-1, 1000, 2**31 - 1, -(2**31))),
        FieldDescriptor.CPPTYPE_STRING: _strings(field, st.sampled_from(_STRINGS) | st.text(max_size=8)),
    }[field.cpp_type]


def _numbers(field: FieldDescriptor) -> list[int]:
    return [value.number for value in field.enum_type.values] if field.enum_type else []


def _strings(field: FieldDescriptor, strings: st.SearchStrategy[str]) -> st.SearchStrategy:
    """Of a string field, or of a bytes field."""
    return strings.map(str.encode) if field.type == FieldDescriptor.TYPE_BYTES else strings


# Below the level of messages


def parsed(descriptor: Descriptor, data: bytes) -> Message | None:
    """None for bytes that are no such message."""
    try:
        return GetMessageClass(descriptor).FromString(data)
    except DecodeError:
        return None


@st.composite
def broken(draw: st.DrawFn, whole: bytes) -> bytes:
    """The bytes of a message with something done to them. Some still are a message."""
    return draw(st.sampled_from(_DAMAGES))(draw, whole)


def _place(draw: st.DrawFn, data: bytes) -> int:
    return draw(st.integers(0, len(data)))


def _random(draw: st.DrawFn, data: bytes) -> bytes:
    return draw(st.binary(max_size=64))


def _truncated(draw: st.DrawFn, data: bytes) -> bytes:
    return data[: _place(draw, data)]


def _flipped(draw: st.DrawFn, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4)) if data else 0):
        changed[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(changed)


def _not_utf8(draw: st.DrawFn, data: bytes) -> bytes:
    at = _place(draw, data)
    return data[:at] + b"\xff" + data[at + 1 :]


def _twice(draw: st.DrawFn, data: bytes) -> bytes:
    """One message after the other is one message: later values win, lists are joined."""
    return data + data


def _other_field(draw: st.DrawFn, data: bytes) -> bytes:
    """With a field that is unknown, or known by its number and of another type, in front."""
    number = draw(st.sampled_from((*range(1, 10), 1000, 2**29 - 1)))
    kind, content = draw(
        st.sampled_from(
            (
                (0, b"\x01"), (0, b"\xff" * 9 + b"\x01"), (1, b"\0" * 8), (2, b"\x03abc"), (2, b"\x02\xff\xfe"),
                (2, b"\xff\xff\xff\xff\x07"), (3, b""), (4, b""), (5, b"\0" * 4), (6, b""), (7, b""),
            )
        )
    )  # fmt: skip
    return _varint(number << 3 | kind) + content + data


def _nested(draw: st.DrawFn, data: bytes) -> bytes:
    """Groups within groups, deeper than any parser goes."""
    return b"\xa3\x3f" * draw(st.sampled_from((50, 101, 10_000))) + data


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*parts, number))


_DAMAGES = (_random, _truncated, _flipped, _not_utf8, _twice, _other_field, _nested)
