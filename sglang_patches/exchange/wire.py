"""Messages as bytes. A frame holds a list of messages: a header with its length and checksum, then MessagePack.

Arrays are extension objects, whose code says the type of their elements.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Generic, TypeVar, get_args

import msgspec
import numpy as np

from sglang_patches.exchange.messages import Answer, Message, Ready

MOST_BYTES = 1 << 30  # of a frame: some hundred texts of a million tokens

_HEADER = struct.Struct("<4sII")  # magic, length and CRC-32 of what follows
_MAGIC = b"spec"
_CODES = {np.dtype(np.int32): 1, np.dtype(np.int64): 2, np.dtype(np.float32): 3}

T = TypeVar("T")


class DamagedFrameError(ValueError):
    """The bytes are not a frame, or not one of these messages."""


class Incoming(Generic[T]):
    """Takes a stream of bytes apart. A damaged frame ends the stream: where the next one begins is not known."""

    def __init__(self, kind: object) -> None:
        """Begins a stream of messages of one type.

        kind: the type of the messages, e.g. `Message`.
        """
        self._decoder = msgspec.msgpack.Decoder(list[kind], dec_hook=_array)  # type: ignore[valid-type]
        self._bytes = bytearray()

    @property
    def partial(self) -> bool:
        """Whether a frame has begun that is not complete."""
        return bool(self._bytes)

    def feed(self, data: bytes) -> list[T]:
        """The messages of the frames that these bytes complete. Raises `DamagedFrameError`."""
        self._bytes += data
        messages: list[T] = []
        while (frame := self._frame()) is not None:
            try:
                messages += self._decoder.decode(frame)
            except (ValueError, RecursionError) as error:  # a string that is not UTF-8 is no DecodeError
                raise DamagedFrameError(f"a frame of {len(frame)} bytes does not fit: {error}") from error
        return messages

    def _frame(self) -> bytes | None:
        """Takes out what follows the next header, if it is complete."""
        if len(self._bytes) < _HEADER.size:
            return None
        magic, length, checksum = _HEADER.unpack_from(self._bytes)
        if magic != _MAGIC or length > MOST_BYTES:
            raise DamagedFrameError(f"no frame begins with {bytes(self._bytes[: _HEADER.size])!r}")
        end = _HEADER.size + length
        if len(self._bytes) < end:
            return None
        frame = bytes(memoryview(self._bytes)[_HEADER.size : end])
        del self._bytes[:end]
        if zlib.crc32(frame) != checksum:
            raise DamagedFrameError(f"a frame of {length} bytes has a wrong checksum")
        return frame


def messages_from_worker() -> Incoming[Message]:
    return Incoming(Message)


def answers_from_draft() -> Incoming[Answer | Ready]:
    return Incoming(Answer | Ready)


def frame_of(messages: Sequence[Message | Answer | Ready]) -> bytes:
    """One frame. Raises TypeError for an array whose elements no message has."""
    content = _encoder.encode(messages)
    return _HEADER.pack(_MAGIC, len(content), zlib.crc32(content)) + content


def _extension(array: object) -> msgspec.msgpack.Ext:
    if not isinstance(array, np.ndarray) or array.dtype not in _CODES:
        raise TypeError(f"{array!r} is in no message")
    return msgspec.msgpack.Ext(_CODES[array.dtype], np.ascontiguousarray(array).data)


def _array(kind: object, extension: object) -> np.ndarray:
    """Reads an array from an extension object. Raises ValueError for an array of other elements.

    kind: NDArray[element].
    """
    (element,) = get_args(get_args(kind)[1])
    dtype = np.dtype(element)
    if not isinstance(extension, msgspec.msgpack.Ext) or extension.code != _CODES[dtype]:
        raise ValueError(f"not an array of {dtype}")
    return np.frombuffer(bytes(extension.data), dtype)


_encoder = msgspec.msgpack.Encoder(enc_hook=_extension)
