"""Each tensor-parallel rank writes the tokens of finished requests into a file of its own. Put on the path of a server under test
only; SGLang finds it as a plugin."""

import json
import os
from pathlib import Path

FOLDER = "SPECSTORE_RANKS_FOLDER"
DECODED = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_decode"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        DECODED, lambda result, processor, batch, *_, **__: write(batch.reqs), HookType.AFTER
    )


def write(reqs) -> None:
    """Overlap scheduling may bring a request that has ended once more: what it then has stands in a second line."""
    from sglang.srt.runtime_context import get_parallel

    with Path(os.environ[FOLDER], f"rank-{get_parallel().tp_rank}").open("a") as file:
        for req in reqs:
            if req.finished():
                print(json.dumps([req.rid, list(req.output_ids)]), file=file)
