"""Small draft processes, good and bad: `python -m tests.support.draft_programs NAME`. The functions say what each does."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sglang_patches.exchange.connection import ParentConnection
from sglang_patches.exchange.messages import Answer, Closed, Committed, Growth, Lost, Message, Opened, Ready

READY = Ready(0.5, 1000)
NO_NODES = np.empty(0, np.int64)


def echo(parent: ParentConnection) -> None:
    """Answers each message with its tokens, and one of a session that it does not know as a draft side does."""
    parent.send([READY])
    sessions: set[str] = set()
    while True:
        parent.send([answer for message in parent.receive(None) for answer in _echoed(message, sessions)])


def _echoed(message: Message, sessions: set[str]) -> list[Answer]:
    if isinstance(message, Closed):
        sessions.discard(message.session)
        return []
    if isinstance(message, Opened):
        sessions.add(message.session)
    if message.session not in sessions:
        return [Lost(message.session, message.epoch)]
    number = message.start if isinstance(message, Committed) else message.epoch
    probabilities = np.zeros(len(message.tokens), np.float32)
    return [Growth(message.session, number, 0, NO_NODES, NO_NODES, message.tokens, probabilities)]


def drafting(parent: ParentConnection) -> None:
    """Drafts with a model that always agrees with the target."""
    from sglang_patches.draft_side.side import DraftParts, DraftSide, Learner
    from sglang_patches.methods.saguaro import GeometricFanOut, Rollouts
    from tests.support.agreeing_model import model
    from tests.support.draft_side import FunctionModel

    side = DraftSide(
        FunctionModel(model(1.0)), DraftParts(lambda: Learner(GeometricFanOut(), Rollouts(4))), 8, 8
    )
    parent.send([READY])
    worked = None
    while True:
        heard = side.hear(parent.receive(None if worked is None else 0.0))
        worked = side.work()
        if answers := heard + (worked or []):
            parent.send(answers)


def deaf(parent: ParentConnection) -> None:
    """Is ready, and then neither reads nor ends when its parent hangs up."""
    parent.send([READY])
    time.sleep(3600)


def stuck(parent: ParentConnection) -> None:
    """Reads a message, and never comes back from its work."""
    parent.send([READY])
    parent.receive(None)
    print("read", flush=True)
    time.sleep(3600)


def loading(parent: ParentConnection) -> None:
    """Never becomes ready."""
    print("loading", flush=True)
    time.sleep(3600)


def refusing(parent: ParentConnection) -> None:
    print("one line", flush=True)
    sys.exit("the tokenizer differs from the target's")


def babbling(parent: ParentConnection) -> None:
    """Is ready, then sends what is no frame."""
    parent.send([READY])
    parent.receive(None)
    os.write(parent._socket.fileno(), b"Hello, world!\n" * 100)
    time.sleep(3600)


def hasty(parent: ParentConnection) -> None:
    """Answers before it is ready."""
    parent.send([Lost("nobody", 1)])
    time.sleep(3600)


def forking(parent: ParentConnection) -> None:
    """Its child has the socket too, and lives on."""
    parent.send([READY])
    if os.fork() == 0:
        time.sleep(3600)
    parent.receive(None)
    os.kill(os.getpid(), signal.SIGKILL)


def once(parent: ParentConnection) -> None:
    """Starts for the first time only: says how often it has been started with a file in its folder."""
    starts = Path(sys.argv[2])
    with starts.open("a") as file:
        file.write(".")
    if starts.stat().st_size > 1:
        sys.exit("the device is taken")
    echo(parent)


def lying(parent: ParentConnection) -> None:
    """Lies. Its arguments: the number of token ids, and a seed."""
    from tests.support import lying_draft

    lying_draft.run(parent, int(sys.argv[2]), int(sys.argv[3]))


PROGRAMS: dict[str, Callable[[ParentConnection], None]] = {
    program.__name__: program
    for program in (echo, drafting, deaf, stuck, loading, refusing, babbling, hasty, forking, once, lying)
}

if __name__ == "__main__":
    try:
        PROGRAMS[sys.argv[1]](ParentConnection())
    except EOFError:
        print("the parent hung up", flush=True)
