"""A JSONL file of answers that a run appends to and a later run continues."""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from datastore_service.storage.errors import StorageError

Row = dict[str, Any]
SHOWN_CHARACTERS = 40  # of a prompt in a message


class AnswerFile:
    """One line an answer: an object with the strings `prompt` and `answer`. `round` is the number of the answer among
    those to its prompt, from 1 (1 if it is left out). `tokens` is the answer's exact token ids, if they are known.

    answered: lines by (prompt, round). tokens: token ids in all lines. without_tokens: lines that have none.

    Opening it reads what is there. It cuts off a last line that was not finished. One run at a time has the file: a lock
    keeps a second one out, and the kernel releases it when the process ends.
    Raises StorageError for a file of another kind and for one that another run has, OSError for one that cannot be
    opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answered: Counter[tuple[str, int]] = Counter()
        self.tokens = self.without_tokens = 0
        self._file = path.open("a+b")
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __len__(self) -> int:
        """The number of answers."""
        return self.answered.total()

    def append(self, row: Row) -> None:
        """Writes a line. When it returns, only a failure of the machine can take the line away."""
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()
        self._count(row)

    def missing(self, prompts: Sequence[str], rounds: int = 1) -> list[tuple[int, int]]:
        """(index of the prompt, round) of each answer that is not here, first rounds first. A prompt that occurs twice
        gets two answers a round. Raises StorageError if the file answers a prompt that is not among them."""
        self._refuse_others(prompts)
        left, missing = self.answered.copy(), []
        for number in range(1, rounds + 1):
            for index, prompt in enumerate(prompts):
                if left[prompt, number] > 0:
                    left[prompt, number] -= 1
                else:
                    missing.append((index, number))
        return missing

    def _refuse_others(self, prompts: Iterable[str]) -> None:
        known = set(prompts)
        for prompt, _ in self.answered:
            if prompt not in known:
                raise StorageError(
                    self.path, "prompt", f"holds answers to other prompts: {prompt[:SHOWN_CHARACTERS]!r}"
                )

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(self.path, "lock", "another run writes to this file") from None

    def _read(self) -> None:
        self._file.seek(0)
        complete = 0  # bytes
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                self._check_unfinished(number, line)
                self._file.truncate(complete)
                return
            self._count(self._row(number, line))
            complete += len(line)

    def _check_unfinished(self, number: int, line: bytes) -> None:
        """Raises StorageError for a last line that no run has begun: cutting it off would destroy somebody's text."""
        try:
            json.loads(line)
        except ValueError:
            if not line.startswith(b'{"'[: len(line)]):
                raise self._not_an_answer(number) from None
        else:
            self._row(number, line)

    def _row(self, number: int, line: bytes) -> Row:
        try:
            row = json.loads(line)
        except ValueError:
            raise self._not_an_answer(number) from None
        match row:
            case {"prompt": str(), "answer": str()} if isinstance(row.get("round", 1), int):
                return row
        raise self._not_an_answer(number)

    def _not_an_answer(self, number: int) -> StorageError:
        return StorageError(
            self.path, f"line {number}", "no answer: not a JSON object with `prompt` and `answer`"
        )

    def _count(self, row: Row) -> None:
        self.answered[row["prompt"], row.get("round", 1)] += 1
        tokens = row.get("tokens")
        if tokens is None:
            self.without_tokens += 1
        else:
            self.tokens += len(tokens)
