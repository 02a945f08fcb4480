"""What a worker is made of: the request book, the length rule, and its method's sources of drafts, the datastore and the draft process
among them."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from sglang.srt.arg_groups.overrides import resolved_view

from datastore_service.client import Datastore, Texts, open_datastore
from datastore_service.protocol.tree import DraftTree
from datastore_service.protocol.types import Budget, Namespace
from sglang_patches.draft_process.arguments import given_of
from sglang_patches.draft_process.settings import DraftSettings, draft_settings
from sglang_patches.drafting.channel import ProcessChannel
from sglang_patches.drafting.datastore import DatastoreFeed
from sglang_patches.drafting.seams import DraftChannel
from sglang_patches.drafting.speculation import Speculation
from sglang_patches.early_exit.tap import Tap
from sglang_patches.exchange.messages import Sampling
from sglang_patches.host.versions import host
from sglang_patches.ledger.outcome import Follower
from sglang_patches.ledger.requests import RequestBook, RequestState, tenants_of
from sglang_patches.ledger.shared_session import shared_session
from sglang_patches.methods.registry import Method, Surroundings
from sglang_patches.namespace import namespace_of
from sglang_patches.options import load_options
from sglang_patches.start.tree_attention import verifies_chains_only
from sglang_patches.step.acceptance import Learning
from sglang_patches.step.base import Drafted, TreeWorker
from sglang_patches.step.courier import make_courier
from sglang_patches.step.epoch import EPOCH
from sglang_patches.step.exit_reader import ExitReader, make_tap
from sglang_patches.step.sources import DatastoreSource, DraftSideSource, Sources
from sglang_patches.step.widths import Widths, length_policy, possible_widths
from sglang_patches.verification.target_sampling import needs_plain_step

if TYPE_CHECKING:
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


PROGRAM = (sys.executable, "-m", "sglang_patches.draft_process")


@dataclass(slots=True)
class Launch(Drafted):
    """A step that is being launched.

    began: by perf_counter.
    """

    states: list[RequestState]
    trees: list[DraftTree]
    began: float


class MethodWorker(TreeWorker[Launch]):
    """A worker with the parts of its method, which its class names."""

    method: ClassVar[Method]

    @classmethod
    def of(cls, method: Method) -> type[Self]:
        return type(f"{cls.__name__}[{method.name}]", (cls,), {"method": method})

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker, self.method.verifier)
        self.options = load_options()
        nodes = self.max_width - 1
        self.budget = Budget(nodes, depth=nodes, children=nodes if self.verifies_trees() else 1)
        widths = self.possible_widths()
        self.width_graphs = widths.graphs
        self.policy = length_policy(widths, self.model_runner, self.device)
        self.book = RequestBook(
            self.vocab_size,
            self.options.publish == "on",
            tenants_of(self.options),
            needs_plain_step,
            shared_session if server_args.disaggregation_mode == "decode" else lambda req: None,
            EPOCH.now,
        )
        self.exit: ExitReader | None = None
        if self.method.early_exit:
            self.exit = ExitReader(self.make_tap(), self.options.draft_rows, self.verifier.seed_of)
        self.sources = self._make_sources() if self.first_rank else Sources()
        self.learning = Learning(self.policy.acceptance)
        self.followers: list[Follower] = [*self.sources.followers, self.learning]

    def possible_widths(self) -> Widths:
        """The widths that steps may have."""
        return possible_widths(self.model_runner, self.max_width, self.options.length, self.device)

    def verifies_trees(self) -> bool:
        """Whether a node may have several children."""
        return not verifies_chains_only(self.model_runner)

    @property
    def vocab_size(self) -> int:
        return self.model_runner.model_config.vocab_size

    @property
    def namespace(self) -> Namespace:
        """What the datastore keeps the server's texts under."""
        return namespace_of(self.server_args, self.options)

    def make_tap(self) -> Tap:
        return make_tap(self.options, self.model_runner, self.server_args)

    def start_draft(self) -> DraftChannel:
        """Starts the draft process and waits for it: the target's KV cache gets what memory it leaves."""
        settings = draft_settings(
            resolved_view(self.server_args),
            given_of(self.server_args),
            self.options,
            self.method,
            self.namespace,
            self.last_position + 1,
            self.vocab_size,
            host.replica_of(self.model_runner) or 0,
        )
        return start_draft_process(settings)

    def _make_sources(self) -> Sources:
        options, budget, method = self.options, self.budget, self.method
        feed = DatastoreFeed(self._open_datastore, options.deadline_ms / 1e3)
        has_draft_model = bool(self.server_args.speculative_draft_model_path)
        parts = method.parts(Surroundings(options, feed, budget, self.start_draft, has_draft_model))
        logger.info(
            "specstore: %s, %s; datastore %s, up to %d nodes",
            method.name,
            method.summary,
            options.endpoint,
            budget.nodes,
        )
        estimate = self.policy.acceptance.estimate
        if parts.channel is None:
            return DatastoreSource(feed, parts.fallback, estimate, budget)
        speculation = Speculation(parts.channel, budget.nodes, self._sampling_of, vocabulary=self.vocab_size)
        courier = make_courier(self.device)
        return DraftSideSource(feed, parts.fallback, estimate, budget, parts.channel, speculation, courier)

    def _open_datastore(self, texts: Texts) -> Datastore:
        return open_datastore(
            self.options.endpoint,
            self.namespace,
            self.vocab_size,
            prior=self.options.prior or None,
            access=self.options.access,
            tenants=bool(self.options.request_tenant),
            texts=texts,
        )

    def _sampling_of(self, state: RequestState) -> Sampling:
        """How the target draws the request's tokens."""
        wishes = state.req.sampling_params
        noise = self.verifier.seed_of(state.req)
        return Sampling(wishes.temperature, wishes.top_k, wishes.top_p, wishes.min_p, noise, state.ends)


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
