"""Makes the engines of namespaces. An engine gets the prior if the prior has the namespace's tokenizer."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from datastore_service.engine.engine import Engine
from datastore_service.engine.fusion import FusionWeights
from datastore_service.engine.limits import Limits
from datastore_service.engine.live.store import LiveStore
from datastore_service.engine.segment import Segment
from datastore_service.engine.share import Share
from datastore_service.protocol.types import MAX_VOCAB, Namespace
from datastore_service.server.namespaces import EngineFactory
from datastore_service.server.prior_file import NamedPrior
from datastore_service.storage.manifest import open_segments, read_manifest

log = logging.getLogger(__name__)


class _Prior(NamedTuple):
    tokenizer: str
    segments: list[Segment]

    @classmethod
    def read(cls, directory: Path) -> _Prior:
        return cls(read_manifest(directory).tokenizer, open_segments(directory))

    def fits(self, namespace: Namespace) -> bool:
        """Whether it has the namespace's tokenizer; the log says it of one that has not."""
        if namespace.tokenizer == self.tokenizer:
            return True
        log.warning(
            "prior not used: another tokenizer",
            extra={"namespace": namespace.tokenizer, "prior": self.tokenizer},
        )
        return False


def engine_factory(
    directory: Path | None,
    vocab_size: int = MAX_VOCAB,
    limits: Limits | None = None,
    weights: FusionWeights | None = None,
    of_tenants: Mapping[str, Path] | None = None,
    named: Mapping[str, NamedPrior] | None = None,
) -> EngineFactory:
    """Makes the factory of the namespaces' engines. It reads the priors immediately, so that a bad one stops the start: raises
    StorageError, or ValueError for a prior whose vocabulary is larger than `vocab_size`.

    directory: of the prior of all namespaces, None for none.
    vocab_size: token ids are smaller; 2^31 permits any.
    limits: of each engine.
    weights: of each engine.
    of_tenants: for each tenant named, the directory of a further prior, which this tenant alone reads.
    named: further priors that sessions may name, each of some tenants."""
    common = [_Prior.read(directory)] if directory is not None else []
    further = {tenant: [_Prior.read(own)] for tenant, own in (of_tenants or {}).items()}
    choices = {name: (_Prior.read(prior.directory), prior.tenants) for name, prior in (named or {}).items()}
    for prior in itertools.chain(common, *further.values(), (prior for prior, _ in choices.values())):
        Engine(vocab_size, prior.segments)  # checks the sizes
    Engine(vocab_size)  # compiles or loads the kernels before a client waits for them

    def new_engine(namespace: Namespace, store: LiveStore | None, share: Share) -> tuple[Engine, bool]:
        always = [*common, *further.get(namespace.tenant, ())]
        segments = [segment for prior in always if prior.fits(namespace) for segment in prior.segments]
        readable = {
            name: prior.segments
            for name, (prior, tenants) in choices.items()
            if namespace.tenant in tenants and prior.fits(namespace)
        }
        return Engine(vocab_size, segments, weights, limits, store, share, readable), bool(segments)

    return new_engine
