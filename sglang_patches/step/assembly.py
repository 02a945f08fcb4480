"""Makes a worker's sources of drafts: the datastore, the method's parts, and the draft process."""

from __future__ import annotations

import functools
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.arg_groups.overrides import resolved_view

from datastore_service.client import open_datastore
from datastore_service.protocol.types import Budget
from sglang_patches.draft_process.arguments import given_of
from sglang_patches.draft_process.settings import DraftSettings, draft_settings
from sglang_patches.drafting.channel import ProcessChannel
from sglang_patches.drafting.datastore import DatastoreFeed
from sglang_patches.drafting.seams import DraftChannel
from sglang_patches.drafting.speculation import Speculation
from sglang_patches.exchange.messages import Sampling
from sglang_patches.host.versions import host
from sglang_patches.ledger.requests import RequestState
from sglang_patches.methods.registry import Method, Surroundings
from sglang_patches.namespace import namespace_of
from sglang_patches.options import Options
from sglang_patches.step.acceptance import Acceptance
from sglang_patches.step.courier import make_courier
from sglang_patches.step.sources import DatastoreSource, DraftSideSource, Sources

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


PROGRAM = (sys.executable, "-m", "sglang_patches.draft_process")


class Setup(NamedTuple):
    """What a worker's sources are made of.

    budget: of a tree. context_length: the target's. sampling_of: how the target draws a request's tokens.
    """

    server_args: ServerArgs
    options: Options
    method: Method
    budget: Budget
    acceptance: Acceptance
    model_runner: ModelRunner
    device: str
    context_length: int
    sampling_of: Callable[[RequestState], Sampling]

    @property
    def vocab_size(self) -> int:
        return self.model_runner.model_config.vocab_size


def make_sources(setup: Setup, start_draft: Callable[[], DraftChannel]) -> Sources:
    options, budget, method = setup.options, setup.budget, setup.method
    opened = functools.partial(
        open_datastore,
        options.endpoint,
        namespace_of(setup.server_args, options),
        setup.vocab_size,
        prior=options.prior or None,
        tls=options.tls(),
        tenants=bool(options.request_tenant),
    )
    feed = DatastoreFeed(lambda texts: opened(texts=texts), options.deadline_ms / 1e3)
    has_draft_model = bool(setup.server_args.speculative_draft_model_path)
    around = Surroundings(options, feed, budget, setup.acceptance.estimate, start_draft, has_draft_model)
    parts = method.parts(around)
    logger.info(
        "specstore: %s, %s; datastore %s, up to %d nodes",
        method.name,
        method.summary,
        options.endpoint,
        budget.nodes,
    )
    if parts.channel is None:
        return DatastoreSource(feed, parts.fallback)
    speculation = Speculation(parts.channel, budget.nodes, setup.sampling_of, vocabulary=setup.vocab_size)
    courier = make_courier(setup.device)
    return DraftSideSource(feed, parts.fallback, parts.channel, speculation, courier, setup.acceptance)


def start_draft(setup: Setup) -> DraftChannel:
    """Starts the draft process and waits for it."""
    args = setup.server_args
    settings = draft_settings(
        resolved_view(args),
        given_of(args),
        setup.options,
        setup.method,
        namespace_of(args, setup.options),
        setup.context_length,
        setup.vocab_size,
        host.replica_of(setup.model_runner) or 0,
    )
    return start_draft_process(settings)


def start_draft_process(settings: DraftSettings) -> DraftChannel:
    """Waits until it is ready. Raises RuntimeError with the end of its log if it does not become ready."""
    log = Path(tempfile.mkdtemp(prefix="specstore-draft-")) / "log"  # a folder that nobody else can write to
    return ProcessChannel([*PROGRAM, *settings.flags()], environment_of(settings), log)


def environment_of(settings: DraftSettings) -> dict[str, str]:
    """What the process has that differs from this one's. On a CPU its threads are as many as the cores that it is pinned to, or half of
    this process's, unless the operator has set their number."""
    environment = {
        "OMP_WAIT_POLICY": "PASSIVE",  # one that spins slows down its target on the same processor
        # A target on a GPU has set it for its own processes, and SGLang on a CPU refuses it.
        "SGLANG_USE_CUDA_IPC_TRANSPORT": "0",
    }
    if settings.device != "cpu":
        return environment
    cores = len(settings.cores.split(",")) if settings.cores else len(os.sched_getaffinity(0)) // 2
    # On a host with a GPU: SGLang must not find it.
    environment |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return environment | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores)))}
