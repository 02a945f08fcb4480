"""A model's own head as SGLang runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.runtime_context import get_context, get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context

from datastore_service.protocol.tree import DraftTree
from sglang_patches.ledger.usage import HEAD

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

# SGLang says what a head drafts, not how sure it is. Each grade of a node has a value of its own, so that the rate at which nodes of the
# grade are accepted is learned: `step/acceptance.py` learns by tenths.
SIBLING = 2  # grades of a node behind its elder sibling; it is one behind its parent
GRADES = np.linspace(0.95, 0.05, 10).astype(np.float32)


class Head:
    """SGLang's own worker of the head, of which this project calls the parts of a step.

    width: most rows of a request in one step, root included.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        gpu_id: int,
        nccl_port: int,
        target_worker: TpModelWorker,
        width: int,
    ) -> None:
        self._width = width
        self._own_width = own_width(width)
        with _declared_width(self._own_width):
            self.worker: EAGLEWorkerV2 = _worker_class(server_args)(
                server_args, gpu_id, nccl_port, target_worker
            )
        self.worker.draft_worker.speculative_num_draft_tokens = width

    def draft(self, batch: ScheduleBatch) -> list[DraftTree]:
        """The head's tree for each request, on the host. On an accelerator this waits for the head's forwards."""
        with self._drafting(self._own_width):
            drafted = self.worker.draft_worker.draft(batch)
        links = (drafted.draft_token, drafted.retrieve_next_token, drafted.retrieve_next_sibling)
        return trees_of(*(tensor.view(-1, self._own_width).cpu().numpy() for tensor in links))

    def prefill(self, batch: ScheduleBatch, publish: object) -> GenerationBatchResult:
        """Runs the target and then the head over prompts."""
        return self.worker._forward_prefill_batch(batch, publish)

    def extend(self, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        """Writes the head's KV of the accepted tokens, from the target's states, and fills in `result.next_draft_input`. It must run
        after every step, also one for which the head did not draft: the head would go on from states that it does not have."""
        with self._drafting(result.speculative_num_draft_tokens):
            self.worker.draft_worker._draft_extend_for_decode(batch, result)

    @contextlib.contextmanager
    def _drafting(self, rows: int) -> Iterator[None]:
        """What SGLang sets around each forward of a head, for so many rows of a request."""
        drafter = self.worker.draft_worker
        drafter.speculative_num_draft_tokens = rows
        try:
            with (
                draft_tp_context(drafter.parallel_layout),
                speculative_moe_backend_context(),
                speculative_moe_a2a_backend_context(),
            ):
                yield
        finally:
            drafter.speculative_num_draft_tokens = self._width


def _worker_class(server_args: ServerArgs) -> type[EAGLEWorkerV2]:
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
    from sglang.srt.speculative.standalone_worker_v2 import StandaloneWorkerV2

    algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
    return StandaloneWorkerV2 if algorithm.is_standalone() else EAGLEWorkerV2


def own_width(width: int) -> int:
    """Rows of the head's own tree, root included, of the `width` that a step verifies: as many as it can fill."""
    steps, branches = get_spec().speculative_num_steps, get_spec().speculative_eagle_topk
    if branches == 1:
        return steps + 1
    return min(width, 1 + branches + (steps - 1) * branches**2)


@contextlib.contextmanager
def _declared_width(width: int) -> Iterator[None]:
    """SGLang builds a head that drafts trees of this width inside the block."""
    before = get_spec().speculative_num_draft_tokens
    get_context().override("specstore.head", speculative_num_draft_tokens=width)
    try:
        yield
    finally:
        get_context().override("specstore.head", speculative_num_draft_tokens=before)


def trees_of(tokens: np.ndarray, next_token: np.ndarray, next_sibling: np.ndarray) -> list[DraftTree]:
    """The trees of an `EagleVerifyInput`, which has the arrays' names.

    tokens, next_token, next_sibling: int64 [requests, rows], row 0 is the root.
    """
    parents, grades = np.zeros((2, *tokens.shape), np.int64)
    requests = np.arange(len(tokens))
    for row in range(tokens.shape[1]):  # a row's links lead to later rows
        for link, behind in ((next_token[:, row], 1), (next_sibling[:, row], SIBLING)):
            has = link > 0
            there = requests[has], link[has]
            parents[there] = row if behind == 1 else parents[has, row]
            grades[there] = grades[has, row] + behind
    grades = np.minimum(grades, len(GRADES)) - 1
    return [_tree(*rows) for rows in zip(tokens[:, 1:], parents[:, 1:], grades[:, 1:], strict=True)]


def _tree(tokens: np.ndarray, parents: np.ndarray, grades: np.ndarray) -> DraftTree:
    probs = GRADES[grades]
    sources = np.full(len(tokens), HEAD, np.uint8)
    return DraftTree(tokens.astype(np.int32), (parents - 1).astype(np.int32), probs, sources)
