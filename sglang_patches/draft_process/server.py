"""The draft process's loop: it hears, guesses and drafts, and waits for its worker when there is nothing to do."""

from __future__ import annotations

import gc
import logging
import time

import numpy as np
from prometheus_client import Summary

from datastore_service.client import Datastore, open_datastore
from datastore_service.protocol.types import Namespace
from sglang_patches.draft_process.limits import refuse_other_vocabulary
from sglang_patches.draft_process.model import CATCH_UP, SglangModel
from sglang_patches.draft_process.runner import CHUNK, described_graphs, load_runner
from sglang_patches.draft_process.settings import DraftSettings
from sglang_patches.draft_side.side import DraftParts, DraftSide
from sglang_patches.exchange.connection import ParentConnection
from sglang_patches.exchange.messages import Closed, Opened, Ready
from sglang_patches.methods.registry import METHODS, DraftSurroundings
from sglang_patches.options import load_options

logger = logging.getLogger(__name__)

WARM_UP = "warm-up"  # name of a session
# Tokens of a text whose second chunk is prefilled too: over a prefix, attention backends run other kernels.
TWO_CHUNKS = CHUNK + CATCH_UP + 2
ROOM_SECONDS = 0.5  # after which room is looked for again
ROUND_SECONDS = Summary(
    "specstore_draft_round_seconds",
    "Time of a round of the draft process: messages, guesses, look-ups, the forward or prefill, answers",
)


def draft_parts(settings: DraftSettings) -> DraftParts:
    """The draft side's parts of the method that the settings name."""
    options = load_options()

    def open_store() -> Datastore:
        namespace = Namespace(settings.namespace, settings.fingerprint, options.tenant)
        return open_datastore(
            options.endpoint,
            namespace,
            settings.vocabulary,
            prior=options.prior or None,
            access=options.access,
            tenants=bool(options.request_tenant),
        )

    make = METHODS[settings.method].draft_parts
    assert make is not None, settings.method
    return make(DraftSurroundings(options, settings.lookahead, options.nodes, open_store))


class DraftServer:
    """Raises what SGLang raises for a model that it cannot load, ValueError for one of another vocabulary."""

    def __init__(self, settings: DraftSettings, connection: ParentConnection) -> None:
        self._connection = connection
        if settings.tokenizer:
            target = settings.tokenizer, settings.tokenizer_revision or None
            refuse_other_vocabulary(target, settings.model)
        self._runner = load_runner(settings)
        logger.info("specstore: the draft model's %s", described_graphs(self._runner))
        model = SglangModel(self._runner, settings.rows, CHUNK, settings.vocabulary)
        self._side = DraftSide(model, draft_parts(settings), settings.rows, settings.rows, settings.serial)
        self._warm_up(min(TWO_CHUNKS, model.longest), rounds=4 + settings.lookahead)
        gc.collect()
        gc.freeze()  # to collect what stays until the end, SGLang's modules and the model, would hold up a draft

    def serve(self, began: float) -> None:
        """Until the parent is gone. began: by `time.monotonic`, when the process did."""
        seconds = time.monotonic() - began
        tokens = self._runner.max_total_num_tokens
        logger.info("specstore: draft model ready after %.1f s, %d KV slots", seconds, tokens)
        self._connection.send([Ready(seconds, tokens)])
        try:
            self._rounds()
        except EOFError:
            logger.info("specstore: the worker is gone")

    def _warm_up(self, tokens: int, rounds: int) -> None:
        """Prefills and forwards compile what was not compiled before: the worker takes a long silence for a hang. tokens: of a text
        that the model takes. rounds: at most; a KV cache without room for them ends none."""
        sizes = {
            WARM_UP: tokens,
            f"{WARM_UP}, beside": min(tokens, CATCH_UP + 2),
        }  # a kernel may differ for a single text
        self._side.hear([Opened(session, np.zeros(size, np.int32), 0) for session, size in sizes.items()])
        for _ in range(rounds):
            self._side.work()
        self._side.hear(map(Closed, sizes))

    def _rounds(self) -> None:
        idle = True
        while True:
            patience = 0.0 if not idle else ROOM_SECONDS if self._side.waits_for_room else None
            messages = self._connection.receive(patience)
            began = time.monotonic()
            answers = self._side.hear(messages)
            drafted = self._side.work()
            idle = drafted is None
            answers += drafted or ()
            if answers:
                self._connection.send(answers)
            if not idle:
                ROUND_SECONDS.observe(time.monotonic() - began)
