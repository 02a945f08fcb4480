"""Messages as bytes: whatever the messages and wherever the stream is cut, they arrive; damage is noticed."""

import struct
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sglang_patches.exchange.messages import (
    Answer,
    Closed,
    Committed,
    Growth,
    Lost,
    Message,
    Opened,
    Ready,
    Sampling,
    Verifying,
)
from sglang_patches.exchange.wire import DamagedFrameError, Incoming, answers_from_draft, frame_of

numbers = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False)


def array(dtype):
    return st.integers(0, 40).flatmap(lambda size: arrays(dtype, size))


int32, int64, float32 = map(array, (np.int32, np.int64, np.float32))
sampling = st.builds(Sampling, floats, numbers, floats, floats, st.none() | numbers, st.frozensets(numbers))
everything = st.one_of(
    st.builds(Opened, st.text(), int32, numbers, sampling, st.none() | numbers),
    st.builds(Committed, st.text(), numbers, int32, numbers),
    st.builds(Verifying, st.text(), numbers, int64, int64, int32),
    st.builds(Closed, st.text()),
    st.builds(Growth, st.text(), numbers, numbers, int64, int64, int32, float32),
    st.builds(Lost, st.text(), numbers),
    st.builds(Ready, floats, numbers),
)


def incoming():
    return Incoming(Message | Answer | Ready)


def fields(message):
    """Comparable, with the type of each array's elements."""
    values = [getattr(message, name) for name in message.__struct_fields__]
    return type(message), [
        (v.dtype, v.tobytes(), v.shape) if isinstance(v, np.ndarray) else v for v in values
    ]


def framed(content):
    """A frame as the wire makes it, of any content."""
    return struct.pack("<4sII", b"spec", len(content), zlib.crc32(content)) + content


@given(st.lists(st.lists(everything, max_size=5), max_size=4), st.integers(1, 500))
def test_messages_survive_however_the_stream_is_cut(batches, size):
    stream, reader, found = b"".join(map(frame_of, batches)), incoming(), []
    for begin in range(0, len(stream), size):
        found += reader.feed(stream[begin : begin + size])
    assert [*map(fields, found)] == [fields(message) for batch in batches for message in batch]
    assert not reader.partial


@given(st.lists(everything, min_size=1, max_size=4), st.data())
def test_a_changed_byte_is_noticed(batch, data):
    frame = bytearray(frame_of(batch))
    at = data.draw(st.integers(0, len(frame) - 1).filter(lambda at: at not in (6, 7)))  # a length of many MB
    frame[at] ^= data.draw(st.integers(1, 255))
    reader = incoming()
    try:
        assert reader.feed(bytes(frame)) == [] and reader.partial  # it says that it is longer
    except DamagedFrameError:
        return
    with pytest.raises(DamagedFrameError):  # what follows does not fit
        reader.feed(bytes(1 << 17))


@given(st.binary(min_size=12))
def test_other_bytes_are_no_frame(data):
    with pytest.raises(DamagedFrameError, match="no frame begins"):
        incoming().feed(b"\0" + data)


@given(st.binary())
def test_other_content_is_no_message(content):
    """With a right checksum, as another version would send it."""
    try:
        assert incoming().feed(framed(content)) == []
    except DamagedFrameError as error:
        assert "does not fit" in str(error)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([["Opened", "s", 7, 1]], "not an array of int32"),
        ([["Opened", "s", msgspec.msgpack.Ext(2, bytes(8)), 1]], "not an array of int32"),
        ([["Opened", "s", msgspec.msgpack.Ext(1, bytes(7)), 1]], "multiple of element size"),
        ([["Opened", "s"]], "length"),
        ([["Elsewhere", "s"]], "Elsewhere"),
        ({"session": "s"}, "array"),
    ],
)
def test_what_does_not_fit_is_named(content, reason):
    with pytest.raises(DamagedFrameError, match=reason):
        incoming().feed(framed(msgspec.msgpack.encode(content)))


@pytest.mark.parametrize(
    "content",
    [
        b"\x91\x94\xa6Opened\xa1\xed\xc0\x01",  # a name that is not UTF-8
        b"\x91\xdc\xff\xff\xa6Opened\xa1s" + b"\x91" * 50_000,  # lists within lists
    ],
)
def test_what_msgspec_names_by_other_errors_is_no_message(content):
    with pytest.raises(DamagedFrameError, match="does not fit"):
        incoming().feed(framed(content))


def test_messages_do_not_come_from_the_draft_process():
    with pytest.raises(DamagedFrameError, match="Closed"):
        answers_from_draft().feed(frame_of([Closed("s")]))


def test_an_array_that_no_message_has_is_refused():
    with pytest.raises(TypeError):
        frame_of([Opened("s", np.zeros(2, np.uint8), 1)])


def test_views_and_strides_survive():
    tokens = np.arange(20, dtype=np.int32)[3:17:2]
    (opened,) = incoming().feed(frame_of([Opened("s", tokens, 1)]))
    assert opened.tokens.tolist() == tokens.tolist()
