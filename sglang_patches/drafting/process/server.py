"""The draft process's loop: it hears, guesses and drafts, and waits for its worker when there is nothing to do."""

from __future__ import annotations

import logging
import time

import numpy as np

from sglang_patches.drafting.draft_side import DraftSide
from sglang_patches.drafting.messages import Closed, Opened, Ready
from sglang_patches.drafting.process.connection import ParentConnection
from sglang_patches.drafting.process.model import SglangModel
from sglang_patches.drafting.process.runner import load_runner
from sglang_patches.drafting.process.settings import DraftSettings
from sglang_patches.drafting.process.vocabulary import refuse_other_vocabulary
from sglang_patches.drafting.saguaro import GeometricFanOut, Rollouts

logger = logging.getLogger(__name__)

CHUNK = 256  # tokens of a prompt between two draft forwards
ROOM_SECONDS = 0.5  # after which room is looked for again


class DraftServer:
    """Raises what SGLang raises for a model that it cannot load, ValueError for one of another vocabulary."""

    def __init__(self, settings: DraftSettings, connection: ParentConnection) -> None:
        self._connection = connection
        if settings.tokenizer:
            refuse_other_vocabulary(settings.tokenizer, settings.model_path)
        self._runner = load_runner(settings)
        model = SglangModel(self._runner, settings.rows, CHUNK, settings.vocabulary)
        drafter = Rollouts(settings.lookahead)
        self._side = DraftSide(model, GeometricFanOut(), drafter, settings.rows, settings.rows)
        self._warm_up(rounds=2 + settings.lookahead)

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

    def _warm_up(self, rounds: int) -> None:
        """A prefill and forwards compile what was not compiled before: the worker takes a long silence for a hang. rounds: at most;
        a KV cache without room for them ends none."""
        self._side.hear([Opened("", np.zeros(CHUNK, np.int32), 0)])
        for _ in range(rounds):
            self._side.work()
        self._side.hear([Closed("")])

    def _rounds(self) -> None:
        idle = True
        while True:
            patience = 0.0 if not idle else ROOM_SECONDS if self._side.waits_for_room else None
            answers = self._side.hear(self._connection.receive(patience))
            drafted = self._side.work()
            idle = drafted is None
            answers += drafted or ()
            if answers:
                self._connection.send(answers)
