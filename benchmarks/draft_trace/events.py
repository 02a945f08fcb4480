"""The events of a trace, one a line of JSON. Times are nanoseconds by `time.monotonic_ns`, which all processes of a machine share.

`frame` is a list of messages as they cross the channel (`drafting/wire.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.draft_trace import VARIABLE
from datastore_service.protocol.tree import DraftTree
from datastore_service.protocol.types import Opening
from sglang_patches.drafting.messages import Answer, Message, Sampling
from sglang_patches.drafting.wire import answers_from_draft, frame_of, messages_from_worker

now = time.monotonic_ns


class Tree(msgspec.Struct, tag=True):
    """A DraftTree's arrays as bytes."""

    tokens: bytes
    parents: bytes
    probs: bytes
    sources: bytes


class State(msgspec.Struct, tag=True):
    """A request's state. key: of the object. text: int32. fields, sets: those of its other fields that are plain values, and
    those that are sets of token ids."""

    key: int
    opening: Opening
    text: bytes
    tree: Tree
    fields: dict[str, str | int | float | bool | None]
    sets: dict[str, list[int]]


class Outcome(msgspec.Struct, tag=True):
    state: State
    start: int
    tokens: bytes
    tree: Tree
    accepted: bytes


class Array(msgspec.Struct, tag=True):
    """dtype: NumPy's name of it."""

    dtype: str
    shape: list[int]
    values: bytes


Value = Tree | State | Outcome | Array | int


# The worker


class Began(msgspec.Struct, tag=True):
    """nodes: most of a tree. vocabulary: number of token ids."""

    at: int
    nodes: int
    vocabulary: int


class Call(msgspec.Struct, tag=True):
    """Of a method of the worker's `Speculation`. An argument is a list; None stands for the patience."""

    at: int
    name: str
    arguments: list[list[Value] | None]


class Returned(msgspec.Struct, tag=True):
    """The trees of a look-up."""

    at: int
    trees: list[Tree]


class Posted(msgspec.Struct, tag=True):
    at: int
    frame: bytes


class Collected(msgspec.Struct, tag=True):
    """patience: seconds that it was ready to wait."""

    began: int
    at: int
    patience: float
    frame: bytes


class Clock(msgspec.Struct, tag=True):
    """What the worker's clock said, in seconds."""

    seconds: float


class Patient(msgspec.Struct, tag=True):
    """What the fallback answered."""

    seconds: float
    nodes: int


class Sampled(msgspec.Struct, tag=True):
    """How the target draws a request's tokens."""

    sampling: Sampling


class Forward(msgspec.Struct, tag=True):
    """Of the target. mode: SGLang's. width: rows of a request."""

    began: int
    at: int
    mode: str
    requests: int
    width: int


class Step(msgspec.Struct, tag=True):
    """A decode step of the worker, its forward included."""

    began: int
    at: int


# The draft process


class Settled(msgspec.Struct, tag=True):
    """What the draft process was told at its start. method: its name."""

    at: int
    rows: int
    lookahead: int
    method: str = "SAGUARO"


class Heard(msgspec.Struct, tag=True):
    """answers: what the draft side said at once."""

    at: int
    frame: bytes
    answers: bytes


class Candidates(msgspec.Struct):
    tokens: bytes
    probabilities: bytes


class DraftForward(msgspec.Struct):
    """rows: session and node of each that was asked for. candidates: of each, None where there was no room."""

    began: int
    at: int
    rows: list[tuple[str, int]]
    candidates: list[Candidates | None]


class Worked(msgspec.Struct, tag=True):
    """One round. ready: the answers to the draft side's questions whether a session can be run, in order. prefilled: whether
    there was a chunk of a text to run, and when that began and ended. idle: whether there was nothing to do."""

    began: int
    at: int
    ready: list[bool]
    forward: DraftForward | None
    prefilled: tuple[bool, int, int] | None
    idle: bool
    answers: bytes


Event = (
    Began | Call | Returned | Posted | Collected | Clock | Patient | Sampled | Forward | Step
    | Settled | Heard | Worked
)  # fmt: skip


class Trace:
    """Writes this process's events. Each is on its way to the file before the next begins, however the process ends."""

    def __init__(self, process: str) -> None:
        path = Path(os.environ[VARIABLE]) / f"{process}-{os.getpid()}.jsonl"
        self._file = path.open("wb", buffering=0)
        self._encoder = msgspec.json.Encoder()

    def write(self, event: Event) -> None:
        self._file.write(self._encoder.encode(event) + b"\n")


def read(path: Path) -> list[Event]:
    """A last line that is not complete is left out: its process was killed. Raises msgspec.DecodeError for any other file."""
    decoder = msgspec.json.Decoder(Event)
    return [decoder.decode(line) for line in path.read_bytes().split(b"\n")[:-1]]


def framed(messages: Sequence[Message | Answer]) -> bytes:
    return frame_of(list(messages))


def messages_of(frame: bytes) -> list[Message]:
    return messages_from_worker().feed(frame)


def answers_of(frame: bytes) -> list[Answer]:
    return answers_from_draft().feed(frame)  # type: ignore[return-value] - none is the first


def plain_tree(tree: DraftTree) -> Tree:
    return Tree(*(each.tobytes() for each in (tree.tokens, tree.parents, tree.probs, tree.sources)))


def tree_of(plain: Tree) -> DraftTree:
    return DraftTree(
        array(plain.tokens, np.int32),
        array(plain.parents, np.int32),
        array(plain.probs, np.float32),
        array(plain.sources, np.uint8),
    )


def array(data: bytes, dtype: type) -> np.ndarray:
    return np.frombuffer(data, dtype)
