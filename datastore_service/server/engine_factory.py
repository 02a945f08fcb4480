"""Makes the engines of namespaces. An engine gets the prior if the prior has the namespace's tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path

from datastore_service.engine.engine import Engine
from datastore_service.engine.fusion import FusionWeights
from datastore_service.engine.limits import Limits
from datastore_service.engine.live.store import LiveStore
from datastore_service.protocol.types import MAX_VOCAB, Namespace
from datastore_service.server.namespaces import EngineFactory
from datastore_service.storage.manifest import open_segments, read_manifest

log = logging.getLogger(__name__)


def engine_factory(
    directory: Path | None,
    vocab_size: int = MAX_VOCAB,
    limits: Limits | None = None,
    weights: FusionWeights | None = None,
) -> EngineFactory:
    """directory: of the prior, None for none. vocab_size: token ids are smaller; 2^31 permits any. limits, weights: of
    each engine.

    Reads the prior immediately, so that a bad one stops the start: raises StorageError, or ValueError for a prior whose
    vocabulary is larger than `vocab_size`."""
    tokenizer, segments = None, []
    if directory is not None:
        tokenizer, segments = read_manifest(directory).tokenizer, open_segments(directory)
    Engine(
        vocab_size, segments
    )  # checks the sizes, and compiles or loads the kernels before a client waits for them

    def new_engine(namespace: Namespace, store: LiveStore | None) -> tuple[Engine, bool]:
        fits = namespace.tokenizer == tokenizer
        if tokenizer is not None and not fits:
            log.warning(
                "prior not used: another tokenizer",
                extra={"namespace": namespace.tokenizer, "prior": tokenizer},
            )
        return Engine(vocab_size, segments if fits else (), weights, limits, store), fits

    return new_engine
