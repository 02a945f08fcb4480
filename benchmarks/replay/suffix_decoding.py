"""Suffix decoding (Oliaro et al., 2025) through Snowflake's own package, `arctic-inference`; `make peers` builds it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import count

import numpy as np

from benchmarks.replay.method import Method, tree_of
from datastore_service.protocol.tree import DraftTree

DEPTH = 64  # the package's default


def installed() -> bool:
    return importlib.util.find_spec("arctic_inference") is not None


class SuffixDecoding(Method):
    """tree: a tree of up to `nodes` whatever its estimates, instead of a chain under the package's default thresholds, which
    is what vLLM runs. prior: documents as answers of earlier requests."""

    def __init__(self, prior: Sequence[np.ndarray], nodes: int, tree: bool) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache = SuffixDecodingCache(max_tree_depth=DEPTH)
        self._limits = {"max_spec_tokens": nodes, "use_tree_spec": tree}
        if tree:
            self._limits |= {"max_spec_factor": float(nodes), "min_token_prob": 0.0}
        self._numbers = count()
        for document in prior:
            self.begin(np.empty(0, np.int32))
            self._cache.add_active_response(self._request, np.ascontiguousarray(document, np.int32))
            self._cache.stop_request(self._request)

    def begin(self, prompt: np.ndarray) -> None:
        self._request, self._sent = next(self._numbers), len(prompt)
        self._cache.start_request(self._request, prompt)

    def draft(self, text: np.ndarray) -> DraftTree:
        self._cache.add_active_response(self._request, text[self._sent :])
        self._sent = len(text)
        draft = self._cache.speculate(self._request, text[-DEPTH:], **self._limits)
        return tree_of(draft.token_ids, draft.parents)

    def end(self, text: np.ndarray) -> None:
        self._cache.add_active_response(self._request, text[self._sent :])
        self._cache.stop_request(self._request)
