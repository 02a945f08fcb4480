"""Requests that want their prompt read and nothing said (`max_new_tokens: 0`), to score texts for example.

SGLang has a path of its own for them, and turns it off under any speculation, because some methods draft in a prefill. Without it such a
request is answered with the log-probability of a token that it did not ask for, and not with those at the places that it names.
"""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import Req


def serve_prefill_only() -> None:
    """For the scheduler's process alone. A hook of SGLang's registry would make a function of the property."""
    Req.is_prefill_only = property(lambda req: req.sampling_params.max_new_tokens == 0)
