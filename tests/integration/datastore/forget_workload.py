"""A thousand subjects, a hundred of them forgotten, killed on the way: `python -m tests.integration.datastore.forget_workload`.

A namespace is filled once: some of it sealed and merged, some in logs, some in three snapshots. For each point, one process opens a copy of
it and forgets until it kills itself with SIGKILL at a call that changes a file, and another one opens what was left. Then nothing of the
others may be missing, and nothing of the forgotten may be found: by queries, or in any byte of any file.

Prints one line with the number of points; a failure ends it with a traceback.
"""

from __future__ import annotations

import gc
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datastore_service.engine.engine import Engine
from datastore_service.engine.live import merge_policy
from datastore_service.engine.provenance import Subject
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Budget, Entry, Opening, Status
from datastore_service.storage.live_manifest import read_live_manifest
from datastore_service.storage.search import Finder
from tests.integration.datastore.crash_workload import (
    VOCAB,
    Disk,
    child,
    compile_kernels,
    must_succeed,
    open_engine,
    points,
)

SUBJECTS, STRIDE = 1000, 10  # every tenth is forgotten
LIMIT = 1 << 24
CONTEXT = 12  # tokens of a query
FORGOTTEN = [Subject.named("user", f"user {number}") for number in range(0, SUBJECTS, STRIDE)]
Texts = Counter[bytes]


@dataclass(frozen=True)
class Corpus:
    """The documents of all subjects. length: tokens of each. rounds: documents of each subject."""

    length: int
    rounds: int

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        """Subject and text, in the order in which they are published."""
        for number in range(SUBJECTS * self.rounds):
            text = np.random.default_rng(number).integers(0, VOCAB, self.length, dtype=np.int32)
            yield number % SUBJECTS, text

    def texts(self, forgotten: bool) -> Texts:
        return Counter(text.tobytes() for subject, text in self if (subject % STRIDE == 0) == forgotten)


def snapshots(total: int) -> list[int]:
    """After which document each was made."""
    return [total // 4, total // 2, 3 * total // 4]


def fill(root: Path, corpus: Corpus) -> None:
    """The last tenth stays in logs."""
    engine = open_engine(root, LIMIT)
    total = SUBJECTS * corpus.rounds
    for number, (subject, text) in enumerate(corpus):
        entry = Entry("s", 0, text, opening=Opening(user=f"user {subject}"), closing=True)
        assert engine.step([entry])[0].status is Status.OK
        engine.settle()
        if number in snapshots(total):
            engine.snapshot(f"after {number}".replace(" ", "-"))
    engine.sync()


def forget(root: Path, kill_at: int, torn: bool, tell: Callable[[bytes], None]) -> None:
    engine = open_engine(root, LIMIT)
    engine.settle()
    disk = Disk(root, kill_at, torn)
    engine.forget(FORGOTTEN)
    tell(b"answered" if kill_at else "\n".join(disk.calls).encode())


def texts_of(engine: Engine) -> Texts:
    view = engine._live.view
    sealed = (segment.document(i) for segment in view.segments for i in range(segment.documents))
    fresh = (text for index in view.fresh for text in index.documents())
    return Counter(
        text.astype(np.int32).tobytes() for texts in (sealed, fresh) for text in texts if len(text)
    )


def check(root: Path, corpus: Corpus, answered: bool) -> None:
    engine = open_engine(root, LIMIT)
    engine.settle()
    (folder,) = (root / "live").iterdir()
    assert read_live_manifest(folder).forgetting == frozenset(), "not finished"
    kept, gone = corpus.texts(forgotten=False), corpus.texts(forgotten=True)
    if not answered and texts_of(engine) != kept:
        assert texts_of(engine) == kept + gone, "neither forgotten nor as it was"
        engine.forget(FORGOTTEN)  # as its operator, who got no answer, would
    assert texts_of(engine) == kept, "not the text of all others"
    check_queries(engine, kept, gone)
    check_files(root, gone)
    check_snapshots(engine, corpus, kept)
    engine.close()


def check_queries(engine: Engine, kept: Texts, gone: Texts) -> None:
    for texts, found in ((kept, True), (gone, False)):
        for text in list(texts)[:: len(texts) // 50]:
            assert is_proposed(engine, np.frombuffer(text, np.int32)) is found


def is_proposed(engine: Engine, text: np.ndarray) -> bool:
    opening = Opening(publish=False, prompt_length=CONTEXT)
    entry = Entry("q", 0, text[:CONTEXT], budget=Budget(8, 8, 1), opening=opening, closing=True)
    tree = engine.step([entry])[0].tree
    return tree.tokens[:4].tolist() == text[CONTEXT : CONTEXT + 4].tolist() and Tier.LIVE in tree.sources


def check_files(root: Path, gone: Texts) -> None:
    """Looks for the beginning, the middle and the end of each text: half a file would be one too many."""
    parts = set()
    for text in gone:
        tokens = np.frombuffer(text, np.int32).astype("<u2")
        for start in (0, len(tokens) // 2, len(tokens) - 16):
            parts.add(tokens[start:][:16].tobytes())
    finder = Finder(parts)
    for path in root.rglob("*"):
        assert not path.is_file() or not finder.found_in(path.read_bytes()), f"{path} has forgotten text"


def check_snapshots(engine: Engine, corpus: Corpus, kept: Texts) -> None:
    published = [(subject, text.tobytes()) for subject, text in corpus]
    total = len(published)
    for number in snapshots(total):
        engine.restore(f"after-{number}")
        of_others = Counter(text for subject, text in published[: number + 1] if subject % STRIDE)
        assert texts_of(engine) == of_others, f"snapshot after {number}"


def trial(folder: Path, filled: Path, corpus: Corpus, number: int, torn: bool) -> bool:
    """False if it was answered before the point."""
    root = folder / "trial"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(filled, root)
    status, told = child(lambda tell: forget(root, number, torn, tell))
    assert status in (0, signal.SIGKILL), told.decode(errors="replace")
    if number % 3 == 0:  # the start that finishes it is killed too
        child(lambda _: (Disk(root, 1 + number % 17), open_engine(root, LIMIT).settle()))
    must_succeed((number, torn), lambda _: check(root, corpus, answered=bool(told)))
    return status != 0


def main(folder: Path, tokens: int, every: int) -> None:
    rounds = 10 if tokens > 1 << 20 else 1
    corpus = Corpus(tokens // SUBJECTS // rounds, rounds)
    merge_policy.FRESH_TOKENS = min(1 << 16, tokens // 20)
    compile_kernels()
    gc.freeze()
    filled = folder / "filled"
    filled.mkdir(parents=True)
    must_succeed("filling", lambda _: fill(filled, corpus))
    root = folder / "counted"
    shutil.copytree(filled, root)
    calls = must_succeed("counting", lambda tell: forget(root, 0, False, tell)).decode().split("\n")
    killed = sum(trial(folder, filled, corpus, number, torn) for number, torn in points(calls, every))
    print(f"{killed} points of {len(calls)} calls")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
