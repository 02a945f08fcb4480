"""Drafting of others through their own code: SGLang's n-gram drafting (0.5.23) and Snowflake's suffix decoding (`make peers`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import count

import numpy as np

from benchmarks.replay.method import Method, tree_of
from datastore_service.protocol.tree import DraftTree

DEPTH = 18  # --speculative-ngram-max-trie-depth
BREADTH = (1, 10)  # --speculative-ngram-min-bfs-breadth, -max-
CAPACITY = 10_000_000  # --speculative-ngram-capacity
CORPUS = "prior"


class SglangNgram(Method):
    """The trie of what was written, and the suffix automaton over an external corpus. Called in the order and with the arguments of
    SGLang's worker; settings are the server's defaults.

    automaton: documents of the external corpus, which gets half the nodes (the server has no default; with one corpus and
    one trie, halves are what the flag's purpose suggests). warm: documents written into the trie before, which no server
    offers. match: --speculative-ngram-match-type. capacity: nodes of the trie, 190 bytes
    each and allocated at once, if not the server's default."""

    def __init__(
        self,
        nodes: int,
        automaton: Sequence[np.ndarray] = (),
        warm: Sequence[np.ndarray] = (),
        match: str = "BFS",
        capacity: int | None = None,
    ) -> None:
        from sglang.srt.speculative.cpp_ngram.external_corpus import SEPARATOR_TOKEN
        from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

        self._nodes = nodes
        self._corpus = NgramCorpus(
            max_trie_depth=DEPTH,
            min_bfs_breadth=BREADTH[0],
            max_bfs_breadth=BREADTH[1],
            draft_token_num=nodes + 1,
            match_type=match,
            capacity=capacity or CAPACITY,
            external_sam_budget=nodes // 2 if automaton else 0,
            external_corpus_max_tokens=CAPACITY,
        )
        if automaton:
            chunks = [[SEPARATOR_TOKEN, *document.tolist()] for document in automaton]
            loaded = self._corpus.load_external_corpus_named(CORPUS, [chunks[0][1:], *chunks[1:]])
            self._corpus.commit_external_corpus_load(CORPUS, loaded)
        for document in warm:
            self._corpus.batch_put([document.tolist()])
        self._corpus.synchronize()
        self._numbers = count()
        self._request = ""

    def begin(self, prompt: np.ndarray) -> None:
        self._request = f"request {next(self._numbers)}"

    def draft(self, text: np.ndarray) -> DraftTree:
        self._corpus.synchronize()
        tokens, mask = self._corpus.batch_get([self._request], [text[-DEPTH:].tolist()], [len(text)])
        return _tree(tokens, mask.reshape(self._nodes + 1, self._nodes + 1))

    def verifying(self, text: np.ndarray) -> None:
        self._corpus.batch_put([text[-DEPTH:].tolist()])

    def end(self, text: np.ndarray) -> None:
        self._corpus.erase_match_state([self._request])


def _tree(tokens: np.ndarray, mask: np.ndarray) -> DraftTree:
    """mask[i, j]: node j is an ancestor of node i, or i itself; node 0 is the root."""
    size = len(tokens)
    strictly = mask.astype(bool) & (np.arange(size) < np.arange(size)[:, None])
    parents = (strictly * np.arange(size)).max(axis=1)[1:] - 1
    return tree_of(tokens[1:].tolist(), parents.tolist())


SUFFIX_DEPTH = 64  # the package's default


def installed() -> bool:
    return importlib.util.find_spec("arctic_inference") is not None


class SuffixDecoding(Method):
    """Suffix decoding (Oliaro et al., 2025) by `arctic-inference`.

    tree: a tree of up to `nodes` whatever its estimates, instead of a chain under the package's default thresholds, which
    is what vLLM runs. prior: documents as answers of earlier requests."""

    def __init__(self, prior: Sequence[np.ndarray], nodes: int, tree: bool) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache = SuffixDecodingCache(max_tree_depth=SUFFIX_DEPTH)
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
        draft = self._cache.speculate(self._request, text[-SUFFIX_DEPTH:], **self._limits)
        return tree_of(draft.token_ids, draft.parents)

    def end(self, text: np.ndarray) -> None:
        self._cache.add_active_response(self._request, text[self._sent :])
        self._cache.stop_request(self._request)
