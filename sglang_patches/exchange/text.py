"""A request's tokens in one growing array."""

from __future__ import annotations

import numpy as np


class Text:
    """Views of it stay as they are when it grows: tokens are appended behind them. Only `rewrite` changes tokens."""

    __slots__ = ("_buffer", "length")

    def __init__(self, tokens: np.ndarray) -> None:
        """Begins the text with a copy of the tokens.

        tokens: int32.
        """
        self._buffer = np.empty(2 * len(tokens) + 64, np.int32)
        self._buffer[: len(tokens)] = tokens
        self.length = len(tokens)

    def __len__(self) -> int:
        return self.length

    @property
    def last(self) -> int:
        return self.at(self.length - 1)

    def at(self, place: int) -> int:
        return int(self._buffer[place])

    def between(self, start: int, end: int) -> np.ndarray:
        """int32 tokens [start, end), not a copy."""
        return self._buffer[start : min(end, self.length)]

    def after(self, start: int) -> np.ndarray:
        """int32 tokens from `start` on, not a copy."""
        return self._buffer[start : self.length]

    def rewrite(self, start: int, tokens: np.ndarray) -> None:
        """Puts these tokens in the place of all from `start` on. Raises ValueError if the text has no token before `start`."""
        if start > self.length:
            raise ValueError(f"a text of {self.length} tokens goes on at {start}")
        end = start + len(tokens)
        if end > len(self._buffer):
            kept = self._buffer[:start]
            self._buffer = np.empty(2 * end, np.int32)
            self._buffer[:start] = kept
        self._buffer[start:end] = tokens
        self.length = end
