"""A prefill instance sends prompts to the datastore while it prefills them; the decode instance drafts from them."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from sglang.srt.runtime_context import get_parallel

from datastore_service.client import open_postbox
from datastore_service.protocol.types import Entry
from sglang_patches.ledger.requests import in_vocabulary, request_opening, tenants_of
from sglang_patches.ledger.shared_session import shared_session
from sglang_patches.namespace import namespace_of
from sglang_patches.options import load_options
from sglang_patches.step.base import TreeWorker

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs

    from datastore_service.client.postbox import Postbox

logger = logging.getLogger(__name__)


class PrefillWorker(TreeWorker):
    """Holds no session and keeps no text. A session that no decode instance continues expires in the datastore."""

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        options = load_options()
        self._publish = options.publish == "on"
        self._tenant_of = tenants_of(options)
        self._vocab_size = self.model_runner.model_config.vocab_size
        self._sent: weakref.WeakSet[Req] = weakref.WeakSet()  # a chunked prompt comes several times
        self._postbox: Postbox | None = None
        if get_parallel().tp_rank != 0:
            return
        if options.endpoint.partition(":")[0] == "embedded":
            logger.warning(
                "specstore: an embedded datastore is not shared; decode instances send the prompts"
            )
        else:
            self._postbox = open_postbox(
                options.endpoint,
                namespace_of(server_args, options),
                options.access,
                bool(options.request_tenant),
            )
            logger.info("specstore: prompts go to %s", options.endpoint)

    def check_memory(self) -> None:
        """Nothing is verified here, so verification needs no memory."""

    def init_attention_backends(self) -> None:
        """Nothing is verified here, so every attention backend will do."""

    def clear_cache_pool(self) -> None:
        self._sent.clear()

    def observe_prefill(self, batch: ScheduleBatch) -> None:
        if self._postbox is None:
            return
        entries = [self._opening(req, session) for req in batch.reqs if (session := self._begins(req))]
        if entries:
            self._postbox.post(entries)

    def draft_batch(self, batch: ScheduleBatch, step: object) -> NoReturn:
        raise RuntimeError("a prefill instance does not decode")

    def _begins(self, req: Req) -> str | None:
        """The session to begin, None if there is none or it has begun."""
        if req in self._sent:
            return None
        self._sent.add(req)
        return shared_session(req)

    def _opening(self, req: Req, session: str) -> Entry:
        opening = replace(request_opening(req, self._publish), handing_over=True)
        tokens = in_vocabulary(req.origin_input_ids, self._vocab_size)
        return Entry(session, 0, tokens, opening=opening, tenant=self._tenant_of(req))
