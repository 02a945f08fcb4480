"""Requests that would end a process of SGLang (0.5.23) are refused with status 400 where they enter.

SGLang sends what a client wrote to its scheduler without a look at most of its types. An error there ends the server, for all clients.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from sglang_patches.host import hooks
from sglang_patches.host.versions import host

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import ServerArgs

JSON = (str, int, float, list, dict)
TOKENIZED = "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"


# What SGLang puts into a tensor of so many bits, or looks up with.
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
MOST_BIAS = 1e30  # divided by the least temperature it is a number still


class SessionFields(msgspec.Struct):
    """The types of `session_params`."""

    id: str | None = None
    rid: str | None = None
    offset: Int64 | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


class SamplingFields(msgspec.Struct):
    """The types of `sampling_params`. What is true or false may be anything."""

    max_new_tokens: Int32 | None = None
    min_new_tokens: Int32 = 0
    stop_strs: list[str] | None = None
    stop_token_ids: set[int] | None = None
    stop_regex_strs: list[str] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int32 = 1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    n: Int32 = 1
    beam_width: Int32 | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    stream_interval: Int32 | None = None
    logit_bias: dict[str | int, float] | None = None
    sampling_seed: Int64 | None = None


class RequestFields(msgspec.Struct):
    """The types of a request's other fields, as the scheduler gets them."""

    rid: str
    sampling_params: SamplingFields
    session_params: SessionFields | None = None
    session_id: str | None = None
    return_logprob: bool | None = False
    return_sampling_mask: bool | None = False
    return_hidden_states: bool | str = False
    logprob_start_len: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    routed_experts_start_len: Int32 = 0
    custom_logit_processor: str | None = None
    lora_id: str | None = None
    lora_name: str | None = None
    bootstrap_host: str | None = None
    bootstrap_port: Int64 | None = None
    bootstrap_room: Int64 | None = None
    bootstrap_pair_key: str | None = None
    decode_tp_size: Int64 | None = None
    routed_dp_rank: Int64 | None = None
    disagg_prefill_dp_rank: Int64 | None = None
    routing_key: str | None = None
    priority: Int64 | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    multi_item_delimiter_indices: list[int] | None = None
    token_indices_to_pool: list[int] | None = None


def _around_tokenized(
    original: Callable, manager: TokenizerManager, obj: object, *args: Any, **kwargs: Any
) -> object:
    """Called once a request's text is token ids, for each request of a batch."""
    if not isinstance(obj, GenerateReqInput):
        return original(manager, obj, *args, **kwargs)
    _check_given(obj.sampling_params)
    try:
        tokenized = original(manager, obj, *args, **kwargs)
    except (TypeError, OverflowError) as error:  # of what the client wrote
        raise ValueError(str(error)) from error
    check(tokenized, manager.model_config.vocab_size)
    _check_places(tokenized, manager.server_args)
    _check_processor(tokenized, manager.server_args)
    _drop_unsayable_stops(tokenized.sampling_params, manager.model_config.vocab_size)
    if obj.custom_labels and manager.enable_metrics:
        _check_labels(obj.custom_labels, manager.metrics_collector.labels)
    return tokenized


# SGLang's own notes among a request's parameters. One that comes with `is_normalized` is taken as it is: a temperature of 0 divides logits.
SET_BY_SGLANG = ("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized")


def _check_given(sampling: Collection[str] | None) -> None:
    """Raises ValueError that names the first field that only SGLang sets."""
    for name in SET_BY_SGLANG:
        if name in (sampling or ()):
            raise ValueError(f"sampling_params.{name}: not from a client")


def check(request: TokenizedGenerateReqInput, vocab_size: int) -> None:
    """Raises ValueError that names the field and its limit."""
    try:
        msgspec.convert(request, RequestFields, from_attributes=True)
    except msgspec.ValidationError as error:
        raise ValueError(_naming_field(str(error))) from None
    if request.top_logprobs_num < 0 or request.top_logprobs_num > vocab_size:
        raise ValueError(f"top_logprobs_num: {request.top_logprobs_num} is outside 0..{vocab_size}")
    # Tensors, which come from callers in Python alone.
    if isinstance(getattr(request, "positional_embed_overrides", None), JSON):
        raise ValueError("positional_embed_overrides: not from a client")
    _check_ids(request, vocab_size)
    _check_numbers(request.sampling_params)
    if (
        request.session_params is not None
        and request.session_params.replace
        and not request.session_params.rid
    ):
        raise ValueError("session_params.replace: needs session_params.rid, of the request that is replaced")
    _check_grammar(request.sampling_params)
    if request.mm_inputs is None and request.input_embeds is None:
        _check_prompt(request, vocab_size)


GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


def _check_grammar(params: SamplingParams) -> None:
    """Raises ValueError that names the field, for a character that SGLang's compiler of grammars does not survive."""
    for name in GRAMMARS:
        text = getattr(params, name, None) or ""
        if not host.GRAMMARS_TAKE_NUL and ("\0" in text or r"\u0000" in text):
            raise ValueError(f"sampling_params.{name}: it has the character NUL")


FLOATS = [name for name, kind in SamplingFields.__annotations__.items() if kind == "float"]


def _check_numbers(params: SamplingParams) -> None:
    """Raises ValueError that names the field, for a number that makes probabilities which are none."""
    for name in FLOATS:
        if not math.isfinite(value := getattr(params, name)):
            raise ValueError(f"sampling_params.{name}: {value} is no finite number")
    for token, bias in (params.logit_bias or {}).items():
        if not bias <= MOST_BIAS:
            raise ValueError(f"sampling_params.logit_bias: {bias} of token {token} is above {MOST_BIAS:g}")


def _check_ids(request: TokenizedGenerateReqInput, vocab_size: int) -> None:
    """Checks the token ids that the scheduler looks up. Raises ValueError that names the field."""
    for token in request.token_ids_logprob or ():
        if not 0 <= token < vocab_size:
            raise ValueError(f"token_ids_logprob: {token} is outside [0, {vocab_size})")
    for token in request.sampling_params.stop_token_ids or ():
        if token < 0:
            raise ValueError(f"sampling_params.stop_token_ids: {token} is below 0")


def _check_places(request: TokenizedGenerateReqInput, server_args: ServerArgs) -> None:
    """Checks the places of scores. Raises ValueError that names the field. Places are counted from the prompt's beginning, which must be
    whole in one prefill, as SGLang's own scoring wants it."""
    places = getattr(request, "token_indices_to_pool", None)  # not in SGLang 0.5.17
    if places is None:
        return
    view = resolved_view(server_args)
    if not view.disable_radix_cache or view.chunked_prefill_size != -1:
        raise ValueError("token_indices_to_pool: needs --disable-radix-cache and --chunked-prefill-size -1")
    length = len(request.input_ids or ())
    for place in places:
        if not 0 <= place < length:
            raise ValueError(f"token_indices_to_pool: {place} is outside [0, {length})")


def _check_processor(request: TokenizedGenerateReqInput, server_args: ServerArgs) -> None:
    """A server that takes code from its clients loads it in the scheduler."""
    given = request.custom_logit_processor
    if given is None or not resolved_view(server_args).enable_custom_logit_processor:
        return
    try:
        CustomLogitProcessor.from_str(given)
    except Exception as error:  # of the client's code, whatever it is
        raise ValueError(f"custom_logit_processor: it cannot be loaded: {error}") from None


def _drop_unsayable_stops(sampling: SamplingParams, vocab_size: int) -> None:
    """A tokenizer may have more tokens than the model. These never end an answer, but SGLang's penalties look them up."""
    if sampling.stop_token_ids:
        sampling.stop_token_ids = {token for token in sampling.stop_token_ids if token < vocab_size}


def _check_labels(given: Iterable[str], known: Collection[str]) -> None:
    """A metric has the labels that the server was started with."""
    for name in given:
        if name not in known:
            raise ValueError(f"custom_labels: {name!r} is none of {sorted(known)}")


def _check_prompt(request: TokenizedGenerateReqInput, vocab_size: int) -> None:
    if not request.input_ids:
        if request.session_params is None:  # whose history may be the prompt
            raise ValueError("prompt: it has no tokens")
        return
    ids = np.array(request.input_ids, np.int64)
    low, high = ids.min(), ids.max()
    if low < 0 or high >= vocab_size:
        raise ValueError(f"input_ids: {low if low < 0 else high} is outside [0, {vocab_size})")


def _naming_field(message: str) -> str:
    """msgspec writes the field last: Expected `int`, got `str` - at `$.sampling_params.n`."""
    found = re.fullmatch(r"(.*) - at `\$\.(.*)`", message)
    return f"{found[2]}: {found[1]}" if found else message


HOOKS: dict[str, Callable] = {TOKENIZED: _around_tokenized}


def register() -> None:
    """For the process that answers requests."""
    hooks.register(HOOKS, HookType.AROUND)
