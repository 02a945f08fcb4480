"""SGLang 0.5.18: as 0.5.19, but settings are the fields of `ServerArgs`, which is resolved as it is made; messages to the process that
answers take no further fields; aborts have no function of their own; and a batch's slots need no translation."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_patches.versions import v0_5_19
from sglang_patches.versions.rows import changed, row

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
    from sglang.srt.managers.scheduler_components.output_streamer import _GenerationStreamAccumulator
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

ABORT = "sglang.srt.managers.scheduler_components.output_sender.SenderWrapper.send_output"
STREAMER = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
CPU_BACKENDS = "sglang.srt.server_args.ServerArgs._handle_cpu_backends"
MESSAGE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_batch_output"
RESOLUTION = "sglang.srt.server_args.ServerArgs.__post_init__"

ROWS = changed(
    v0_5_19.ROWS,
    row(ABORT, "self output recv_obj", "hooked: closes the session of a request that ends while it waits"),
    row("sglang.srt.managers.scheduler.AbortReq", None, "as above"),
    row(STREAMER, "self req", "hooked: an answer has our field"),
    row(MESSAGE, "self recv_obj", "hooked: our field is no list"),
    row("sglang.srt.managers.io_struct.unwrap_from_pickle", "obj", "as above"),
    row("sglang.srt.managers.io_struct.wrap_as_pickle", "obj", "as above"),
    row(CPU_BACKENDS, "self", "hooked on a CPU: our attention backend"),
    row("sglang.srt.server_args.add_attention_backend_choices", "choices", "names our attention backend"),
    row(RESOLUTION, "self", "hooked: keeps the settings as they were given"),
    row("sglang.srt.server_args.ServerArgs.get_model_config", "self", "what kind of attention a model has"),
    without=(
        v0_5_19.ABORT,
        v0_5_19.STREAMER,
        v0_5_19.META_INFO,
        v0_5_19.CPU_BACKENDS,
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.build_additional_customized_info",
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.has_additional_customized_info",
        "sglang.srt.arg_groups.overrides.declare_resolution",
        "sglang.srt.arg_groups.overrides.model_config_of",
        "sglang.srt.server_args.ServerArgs.resolve_once",
        "sglang.srt.mem_cache.allocation_sizing.get_alloc_page_size",
        "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.rebind_write_loc",
    ),
)

logger = logging.getLogger(__name__)

_told: dict[str, list] = {}  # the field of the message that is being handled, by request


def keep_given(args: ServerArgs) -> None:
    """Called before settings are resolved: later versions of SGLang keep the given ones by this name."""
    args._raw_input = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}


RESOLUTION_HOOKS: dict[str, Callable] = {RESOLUTION: keep_given}


def declare(args: ServerArgs, **fields: object) -> None:
    """Changes settings while they are resolved. What was declared before would replace a field that is only set."""
    for name, value in fields.items():
        setattr(args, name, value)
    args._resolved_overrides.append(("specstore", fields))


def resolve(args: ServerArgs) -> None:
    """Fills in the settings that were not given: that has been done."""


def model_config_of(args: ServerArgs) -> ModelConfig:
    """The configuration of the served model, while settings are resolved."""
    return args.get_model_config()


def reserve_per_decode() -> tuple[int, int]:
    """Tokens that are reserved for a request at each decode step, and those of a page. The configuration must be published."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.runtime_context import get_schedule

    return get_alloc_reserve_per_decode(), get_schedule().page_size


def aborted(sender: SenderWrapper, output: object, recv_obj: Req | None = None) -> Req | None:
    """The request that a call of `ABORT` ends; None for any other message."""
    from sglang.srt.managers.scheduler import AbortReq

    return recv_obj if isinstance(output, AbortReq) else None


def teller(field: str, summary_of: Callable[[Req], list]) -> Callable:
    """What to call after `STREAMER`, so that messages to the process that answers have a further field. summary_of: a request's
    entry, empty if there is none."""

    def after_accept(result: None, message: _GenerationStreamAccumulator, *, req: Req) -> None:
        if not message.rids or message.rids[-1] != req.rid:
            return  # it is not in this message
        entry, told = summary_of(req), message.customized_info
        if message.rust_server_mode:
            _say_that_nothing_is_told(field)
        elif entry or field in told:
            before = told.get(field) or [[]] * (len(message.rids) - 1)
            told[field] = [*before[: len(message.rids) - 1], entry]

    return after_accept


@functools.cache
def _say_that_nothing_is_told(field: str) -> None:
    logger.warning("specstore: SGLang's Rust server takes no further fields: meta_info has no `%s`", field)


def meta_info_hooks(field: str) -> dict[str, Callable]:
    """What to call around functions of the process that answers, so that an entry of the field can get into `meta_info`."""

    def around_message(original: Callable, manager: TokenizerManager, message: Any) -> object:
        # SGLang would take the field for a list with an entry a token.
        global _told
        from sglang.srt.managers.io_struct import unwrap_from_pickle, wrap_as_pickle

        fields = unwrap_from_pickle(getattr(message, "customized_info", None)) or {}
        _told = dict(zip(message.rids, fields.pop(field, ()), strict=False))
        if _told:
            message.customized_info = wrap_as_pickle(fields) if fields else None
        return original(manager, message)

    return {MESSAGE: around_message}


def put_told(field: str, meta_info: dict[str, Any], message: Any, index: int) -> None:
    """As `meta_info_hooks`, at the last message of a request."""
    for entry in _told.get(message.rids[index], ()):
        meta_info[field] = entry


def place_kv(runner: ModelRunner, batch: ForwardBatch) -> None:
    """Tells the batch where its slots lie: they lie where they are."""


def __getattr__(name: str) -> Any:
    """All else is as in 0.5.19."""
    return getattr(v0_5_19, name)
