"""The last message of a stream of SGLang's Ollama interface has no text: what the last step said is lost.

With plain decoding that is a token, with accepted runs it may be half of the answer. Here an answer's last text comes in a message of
its own, before the one that ends the stream.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_patches.host import hooks

if TYPE_CHECKING:
    from sglang.srt.entrypoints.ollama.serving import OllamaServing
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_SERVING = "sglang.srt.entrypoints.ollama.serving.OllamaServing."


class _TextBeforeEnd:
    """A tokenizer manager, as far as the interface uses it, that tells the end of an answer after its text."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    async def generate_request(self, *request: Any) -> AsyncIterator[dict[str, Any]]:
        async for message in self._manager.generate_request(*request):
            if message["meta_info"]["finish_reason"] is not None:
                yield message | {"meta_info": message["meta_info"] | {"finish_reason": None}}
            yield message


async def _around_stream(original: Callable, serving: OllamaServing, *request: Any) -> object:
    told = copy.copy(serving)
    told.tokenizer_manager = _TextBeforeEnd(serving.tokenizer_manager)
    return await original(told, *request)


HOOKS: dict[str, Callable] = {
    _SERVING + name: _around_stream for name in ("_stream_chat_response", "_stream_generate_response")
}


def register() -> None:
    """For the process that answers requests."""
    hooks.register(HOOKS, HookType.AROUND)
