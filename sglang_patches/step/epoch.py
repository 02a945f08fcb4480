"""The epoch of the served weights: how often they have changed since the server began, as each update of a training run changes them.

All of SGLang's ways to change weights end in the hooked functions, in the scheduler's process. One update may be many calls, each with
some of the tensors. So the epoch rises with the next request that begins, once for all of them."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_patches.host import hooks
from sglang_patches.host.versions import host

logger = logging.getLogger(__name__)

LONGEST_NUMBER = 18  # digits of a version that is a number


class Epoch:
    """Counts the updates. A trainer that numbers its versions (`weight_version`) has its numbers counted instead: they are the same on
    every server, and go on where a server is started anew."""

    def __init__(self) -> None:
        self._current = self._named = 0
        self._changed = False

    def weights_changed(self, version: str | None) -> None:
        """Part of an update has been loaded. version: as the trainer names the new weights, None if it does not."""
        self._changed = True
        if version and version.isdecimal() and len(version) <= LONGEST_NUMBER:
            self._named = int(version)

    def now(self) -> int:
        """The epoch of a request that begins now."""
        if self._changed:
            self._changed = False
            self._current = max(self._current + 1, self._named)
            logger.info("specstore: the weights have changed: epoch %d", self._current)
        return self._current


EPOCH = Epoch()  # of this process's model


def _before_end(updater: object, request: Any, *_: object) -> None:
    EPOCH.weights_changed(getattr(request, "weight_version", None))


HOOKS: hooks.ByKind = {HookType.BEFORE: dict.fromkeys(host.WEIGHT_UPDATES, _before_end)}


def register_updates() -> None:
    """For the scheduler's process, as `hooks.apply`."""
    hooks.apply(HOOKS)
