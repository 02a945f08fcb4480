"""Makes a namespace's engine, with the prior if its tokenizer is the namespace's."""

from __future__ import annotations

import logging
from pathlib import Path

from datastore_service.engine.engine import Engine, Limits
from datastore_service.engine.fusion import FusionWeights
from datastore_service.engine.live.store import LiveStore
from datastore_service.engine.segment import MAX_VOCAB
from datastore_service.protocol.types import Namespace
from datastore_service.server.namespaces import NewEngine
from datastore_service.storage.manifest import open_segments, read_manifest

log = logging.getLogger(__name__)


def engine_maker(
    directory: Path | None,
    vocab_size: int = MAX_VOCAB,
    limits: Limits | None = None,
    weights: FusionWeights | None = None,
) -> NewEngine:
    """directory: of the prior, None for none. vocab_size: token ids are smaller; 2^31 takes any. limits, weights: of
    each engine.

    Reads the prior at once, so that a bad one stops the start: raises StorageError, or ValueError for a prior whose
    vocabulary is larger than `vocab_size`."""
    tokenizer, segments = None, []
    if directory is not None:
        tokenizer, segments = read_manifest(directory).tokenizer, open_segments(directory)
    Engine(
        vocab_size, segments
    )  # checks the sizes; compiles the kernels, or loads them, before anybody waits

    def new_engine(namespace: Namespace, store: LiveStore | None) -> tuple[Engine, bool]:
        fits = namespace.tokenizer == tokenizer
        if tokenizer is not None and not fits:
            log.warning(
                "prior not used: another tokenizer",
                extra={"namespace": namespace.tokenizer, "prior": tokenizer},
            )
        return Engine(vocab_size, segments if fits else (), weights, limits, store), fits

    return new_engine
