"""The texts that a request expects its answer to follow (`custom_params.specstore.reference`): the file to be edited, retrieved passages.

They become token ids where the request's prompt does, and reach the scheduler in its `custom_params`.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.plugins.hook_registry import HookType

from sglang_patches.entry.request_checks import TOKENIZED
from sglang_patches.host import hooks
from sglang_patches.ledger.reference import SEPARATOR
from sglang_patches.ledger.requests import REFERENCE_TOKENS

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from transformers import PreTrainedTokenizerBase

MOST_BYTES = 128 * 1024  # of a request's texts together: ten times a file of 300 lines
FIELD = "custom_params.specstore.reference"


def _after_tokenized(
    tokenized: TokenizedGenerateReqInput, manager: TokenizerManager, obj: object, *_: object, **__: object
) -> None:
    """Called once a request's text is token ids, for each request of a batch. It leaves what the client wrote as it is, of which further
    samples are made."""
    custom = tokenized.sampling_params.custom_params if isinstance(obj, GenerateReqInput) else None
    if not custom:
        return
    if REFERENCE_TOKENS in custom:
        raise ValueError(f"custom_params.{REFERENCE_TOKENS}: not from a client, which gives {FIELD}")
    wishes = custom.get("specstore") or {}
    if (given := wishes.get("reference")) is None:
        return
    tokens = _token_ids(checked_texts(given), manager.tokenizer)
    rest = {name: wish for name, wish in wishes.items() if name != "reference"}
    tokenized.sampling_params.custom_params = custom | {"specstore": rest, REFERENCE_TOKENS: tokens}


def checked_texts(given: object) -> list[str]:
    """The texts that a client gave. Raises ValueError that names the field, and the limit for too many bytes."""
    texts = []
    for text in given if isinstance(given, list) else [given]:
        if not isinstance(text, str):
            raise ValueError(f"{FIELD}: {reprlib.repr(text)} is not a string")
        texts.append(text)
    size = size_of(*texts)
    if size > MOST_BYTES:
        raise ValueError(f"{FIELD}: {size} bytes exceed {MOST_BYTES}")
    return texts


def size_of(*texts: str) -> int:
    """Bytes of UTF-8; JSON can hold half of a surrogate pair, which is none."""
    return sum(len(text.encode(errors="surrogatepass")) for text in texts)


def _token_ids(texts: list[str], tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """The texts' tokens, a SEPARATOR between two texts."""
    if tokenizer is None:
        raise ValueError(f"{FIELD}: not on a server without a tokenizer (--skip-tokenizer-init)")
    ids: list[int] = []
    for text in filter(None, texts):
        unicode = text.encode(errors="replace").decode()
        ids += [SEPARATOR] * bool(ids) + tokenizer.encode(unicode, add_special_tokens=False)
    return ids


HOOKS: hooks.ByKind = {HookType.AFTER: {TOKENIZED: _after_tokenized}}


def register() -> None:
    """For the process that answers requests."""
    hooks.apply(HOOKS)
