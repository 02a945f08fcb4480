"""Starts the draft process of a server."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.overrides import resolving_view

from sglang_patches.drafting.channel import DraftChannel
from sglang_patches.drafting.process.settings import DraftSettings
from sglang_patches.drafting.process_channel import ProcessChannel
from sglang_patches.options import Options

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

PROGRAM = (sys.executable, "-m", "sglang_patches.drafting.process")


def draft_device(options: Options, view: ServerArgs) -> str:
    """Where the draft model runs. view: the resolved arguments. Raises ValueError for a device of another kind than the target's."""
    kind = view.device
    if not options.draft_device:
        return "cpu" if kind == "cpu" else f"{kind}:{view.base_gpu_id + view.tp_size}"
    if options.draft_device.partition(":")[0] != kind:
        raise ValueError(
            f"specstore option draft_device: {options.draft_device} with a target on {kind} is not supported yet"
        )
    return options.draft_device


def draft_settings(
    server_args: ServerArgs, options: Options, context_length: int, vocabulary: int
) -> DraftSettings:
    """context_length, vocabulary: the target's."""
    view = resolving_view(server_args)
    return DraftSettings(
        model_path=str(view.speculative_draft_model_path),
        tokenizer="" if view.skip_tokenizer_init else str(view.tokenizer_path),
        device=draft_device(options, view),
        tokens=options.draft_tokens,
        sessions=view.max_running_requests,
        rows=options.draft_rows,
        lookahead=options.draft_lookahead,
        context_length=context_length,
        vocabulary=vocabulary,
        dtype=view.dtype,
        trust_remote_code=view.trust_remote_code,
    )


def start_draft_process(settings: DraftSettings) -> DraftChannel:
    """Waits until it is ready. Raises RuntimeError with the end of its log if it does not become ready."""
    environment = {"OMP_WAIT_POLICY": "PASSIVE"}  # one that spins slows down its target on the same processor
    if settings.device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // 2))
    log = Path(tempfile.gettempdir()) / f"specstore-draft-{os.getpid()}.log"
    return ProcessChannel([*PROGRAM, *settings.flags()], environment, log)
