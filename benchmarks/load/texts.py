"""What the sessions of a load say: recorded answers, each told of other things.

There are fewer recorded answers than sessions. Said again as they are, they would be found whole in the live tier, and all drafts
would be right. So each session has names of its own for the tokens that few answers share: the repetitions within an answer and
the phrases that many answers share stay, the rest is new."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.traces import Trace

SHARED = 0.25  # of the answers: a token that so many have keeps its id


class Texts:
    """Always the same for a seed. The answers follow each other in a random order."""

    def __init__(self, traces: Sequence[Trace], vocab_size: int, seed: Sequence[int]) -> None:
        self._texts = [np.concatenate([trace.prompt, trace.output]) for trace in traces]
        self._prompts = [len(trace.prompt) for trace in traces]
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)
        counts = np.zeros(vocab_size, np.int64)
        for text in self._texts:
            counts[np.unique(text)] += 1
        self._shared = counts >= SHARED * len(traces)

    def next(self) -> tuple[np.ndarray, int]:
        """int32 token ids of a prompt and its answer, and the prompt's length."""
        number = self._rng.integers(len(self._texts))
        text, shift = self._texts[number], self._rng.integers(self._vocab_size)
        renamed = np.where(self._shared[text], text, (text + shift) % self._vocab_size)
        return renamed.astype(np.int32), self._prompts[number]

    def somewhere(self, first: int, end: int) -> int:
        """A random number from `first` to below `end`: how far a session is when the load begins."""
        return int(self._rng.integers(first, end))
