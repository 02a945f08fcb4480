"""What tenants write: texts that repeat phrases, each with a place that no other text has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

IDS = 4096  # token ids of a tenant; no other tenant has them
PROBE = 8  # tokens of a signature that are a context
_SIGNATURE = 12
_PHRASES = 150


@dataclass(frozen=True)
class Document:
    """tokens: int32, prompt and output. signature: where in `tokens` a sequence begins that no other document has."""

    number: int
    tokens: np.ndarray
    prompt_length: int
    signature: int

    @property
    def context(self) -> np.ndarray:
        """Only this document goes on after it."""
        return self.tokens[self.signature : self.signature + PROBE]

    @property
    def continuation(self) -> list[int]:
        return self.tokens[self.signature + PROBE : self.signature + _SIGNATURE].tolist()


class Texts:
    """The documents of one tenant, by number; always the same for a seed."""

    def __init__(self, seed: int, tenant: int) -> None:
        self._key = seed, tenant
        self.first_id = tenant * IDS
        rng = np.random.default_rng(self._key)
        self._phrases = [self._random(rng, int(size)) for size in rng.integers(3, 15, _PHRASES)]

    def owns(self, tokens: np.ndarray) -> bool:
        return bool(((tokens >= self.first_id) & (tokens < self.first_id + IDS)).all())

    def document(self, number: int) -> Document:
        rng = np.random.default_rng((*self._key, number))
        prompt = self._phrases_of(rng, int(rng.integers(1, 6)))
        before, after = (self._phrases_of(rng, int(rng.integers(0, 6))) for _ in range(2))
        tokens = np.concatenate([prompt, before, self._random(rng, _SIGNATURE), after])
        return Document(number, tokens, len(prompt), len(prompt) + len(before))

    def _phrases_of(self, rng: np.random.Generator, count: int) -> np.ndarray:
        chosen = [self._phrases[i] for i in rng.integers(0, _PHRASES, count)]
        return np.concatenate([np.empty(0, np.int32), *chosen])

    def _random(self, rng: np.random.Generator, size: int) -> np.ndarray:
        return rng.integers(self.first_id, self.first_id + IDS, size, dtype=np.int32)
