"""What the draft process has said and the worker has not collected: bounded, whatever the draft process sends."""

from __future__ import annotations

from collections import deque

from sglang_patches.exchange.messages import Answer, Growth

# Answers and their nodes. The worker takes all in at once, in up to 80 ms on a slow core. A sound draft side says some hundred in a
# step.
MOST = 1 << 15


class Inbox:
    """Drops the oldest answers: they are the likeliest to be of epochs that are over."""

    def __init__(self) -> None:
        self._answers: deque[Answer] = deque()
        self._size = 0

    def __len__(self) -> int:
        return len(self._answers)

    def put(self, answer: Answer) -> int:
        """Returns how many answers were dropped for it."""
        self._answers.append(answer)
        self._size += _size(answer)
        dropped = 0
        while self._size > MOST:
            self._size -= _size(self._answers.popleft())
            dropped += 1
        return dropped

    def take(self) -> list[Answer]:
        """All of them, in order."""
        answers = list(self._answers)
        self._answers.clear()
        self._size = 0
        return answers


def _size(answer: Answer) -> int:
    return 1 + (max(len(answer.nodes), len(answer.tokens)) if isinstance(answer, Growth) else 0)
