"""The algorithms as SGLang sees them: one object per method, in place of a `SpeculativeAlgorithm` member."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_patches import reports
from sglang_patches.draft_process.arguments import OWN, given_of, refuse_target_s_source
from sglang_patches.draft_process.settings import refuse_draft_devices
from sglang_patches.entry import predictions, references, request_checks, request_hook
from sglang_patches.host.hooks import refuse_if_left_out, targets
from sglang_patches.host.symbols import refuse_drift
from sglang_patches.host.versions import INSTALLED, host
from sglang_patches.methods.registry import DEFAULT, HEADS, Method
from sglang_patches.options import load_options
from sglang_patches.start import room, tree_attention
from sglang_patches.step import ends

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

DEFAULT_MAX_RUNNING_REQUESTS = (
    48  # as SGLang's own n-gram algorithm: KV headroom is reserved per running request
)


class TreeAlgorithm(CustomSpecAlgo):
    """One of our methods: it verifies trees that the plugin drafts.

    `is_ngram` is True because SGLang's relay buffers and CUDA-graph capture take their tree shapes from that
    predicate: the trees are irregular and the drafter has neither weights nor KV.
    """

    method: ClassVar[Method]

    @classmethod
    def of(cls, method: Method) -> type[TreeAlgorithm]:
        return type(f"{cls.__name__}[{method.name}]", (cls,), {"method": method})

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    # The scheduler calls the next four on every algorithm; the base class lacks them (SGLang 0.5.23).
    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def get_platform_worker_cls(self) -> type | None:
        return None

    def create_future_map(
        self,
        device: torch.device,
        req_to_token_pool: object,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> FutureMap:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def build_disagg_draft_input(self, batch: ScheduleBatch, *arguments: Any) -> NgramVerifyInput:
        """Called on a decode instance. The base class returns None, and an n-gram algorithm's first step crashes on it."""
        from sglang_patches.disaggregation.first_step import relay_of_prefilled

        last_tokens, future_map = arguments[-2:]
        return relay_of_prefilled(batch, last_tokens, get_spec().speculative_num_draft_tokens, future_map)

    def handle_server_args(self, server_args: ServerArgs) -> None:
        """Refuses settings that cannot work, by name, and fills in the speculative fields. Leaves overlap scheduling as it is."""
        refuse_drift()
        refuse_unsupported(self.method, server_args)
        cfg = resolved_view(server_args)
        verifies = cfg.disaggregation_mode != "prefill"
        register_around(server_args, verifies)
        host.declare(server_args, **tree_attention.choose(self.name, server_args))
        width = load_options().nodes + 1
        host.declare(
            server_args,
            speculative_num_draft_tokens=width,
            # SGLang sizes a step by steps x branches, which must not exceed the width.
            speculative_num_steps=max(1, width // tree_attention.BRANCHES),
            speculative_eagle_topk=tree_attention.BRANCHES,
            enable_mixed_chunk=False,
        )
        if cfg.max_running_requests is None and verifies:
            host.declare(server_args, max_running_requests=DEFAULT_MAX_RUNNING_REQUESTS)


def register_around(server_args: ServerArgs, verifies: bool) -> None:
    """Registers what surrounds a worker in this process. Raises RuntimeError if a hook of the scheduler's process would be left out.

    verifies: whether the server has decode steps.
    """
    refuse_if_left_out(targets(room.HOOKS))
    if verifies:
        refuse_if_left_out(targets(ends.HOOKS, reports.SCHEDULER_HOOKS))
        reports.register_in_entry()
    request_checks.register()
    references.register()
    predictions.register()
    request_hook.register(server_args)


def refuse_unsupported(method: Method, server_args: ServerArgs) -> None:
    """Raises ValueError naming the first setting that the method cannot work with."""
    view = resolved_view(server_args)
    load_options().access()  # reads the files too: until here only a command line has read them
    if load_options().beside_head == "on":
        raise ValueError(f"{method.name}: --specstore-beside-head is for {', '.join(HEADS)}")
    _refuse_wrong_shape(method.name, server_args)
    if method.early_exit and not host.EARLY_EXITS:
        raise ValueError(f"{method.name}: SGLang {INSTALLED} hands out no hidden states for an early exit")
    if method.draft_process:
        if view.disaggregation_mode != "prefill":  # such an instance starts no draft process
            refuse_draft_devices(load_options(), view, method)
        if method.needs_draft_model and not view.speculative_draft_model_path:
            raise ValueError(
                f"{method.name}: --speculative-draft-model-path is missing; {DEFAULT} drafts without a model"
            )
        if view.speculative_draft_model_path:
            refuse_target_s_source(given_of(server_args))
    if method.early_exit and not load_options().early_exit:
        raise ValueError(
            f"{method.name}: --specstore-early-exit is missing; `python -m sglang_patches.training exits` makes one"
        )
    refuse_settings(method.name, server_args, method.supported)
    drafts = method.draft_process and bool(view.speculative_draft_model_path)
    _refuse_without_effect(method.name, drafts, server_args)


def refuse_settings(algorithm: str, server_args: ServerArgs, supported: Mapping[str, object]) -> None:
    """Raises ValueError naming the first setting that no verification of trees works with.

    supported: further server arguments and the one value that the algorithm works with.
    """
    view = resolved_view(server_args)
    if host.attention_is_data_parallel(view):
        raise ValueError(f"{algorithm}: --enable-dp-attention (--attn-dp-size) is not supported")
    for field, only in {**_ONLY_SUPPORTED, **host.ONLY_SUPPORTED, **supported}.items():
        # The given value too: SGLang turns some of them off itself, with a log line that is easily missed.
        for value in (server_args._raw_input[field], getattr(view, field)):
            if value != only:
                raise ValueError(f"{algorithm}: {_flag(field)} {value} is not supported, only {only}")
    for field, refused in _REFUSED.items():
        if getattr(view, field) == refused:
            raise ValueError(f"{algorithm}: {_flag(field)} {refused} is not supported")


# Fields -> the one value that all methods work with, in each version of SGLang.
_ONLY_SUPPORTED = {
    "pp_size": 1,
    "dcp_size": 1,
    "enable_two_batch_overlap": False,
    # From a session's second turn on its last token counts as cached, whose KV no verification has written.
    "enable_streaming_session": False,
    "tokenizer_worker_num": 1,  # SGLang loads no plugins in these processes, and waits for them for ever
    "use_ray": False,  # it loads none in Ray's actors either
    "enable_pdmux": False,  # prefills around the worker
    "attn_cp_size": 1,  # splits a prompt among ranks
    # A verified tree has a row a node, an answer's buffer a row a token.
    "enable_return_routed_experts": False,
    "enable_return_indexer_topk": False,
}
# What SGLang's speculation reads, by the beginnings of names: other methods, and draft models in SGLang's own process.
_SPECULATION = (
    "speculative_",
    "decoupled_spec_",
    "spec_trace_dir",
    "uno_lora_path",
    "enable_multi_layer_eagle",
    "enable_draft_weights_cpu_backup",
)
# Of these, what has an effect here, or is refused with a reason of its own.
_HEEDED = frozenset(
    {
        "speculative_algorithm",
        "speculative_attention_mode",
        "speculative_draft_model_path",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "speculative_num_steps",
    }
)
# Fields -> the one value that no method works with.
_REFUSED = {"grammar_backend": "outlines"}  # a walk over a tree asks for packed bits and a rollback


def is_without_effect(field: str, drafts: bool = False) -> bool:
    """Whether nothing here would read the field. drafts: whether there is a draft process."""
    if field == "enable_mixed_chunk":  # a batch is either of prompts or of decode steps
        return True
    if field in OWN and field not in _HEEDED:
        return not drafts
    return field.startswith(_SPECULATION) and field not in _HEEDED


def _refuse_without_effect(algorithm: str, drafts: bool, server_args: ServerArgs) -> None:
    for field, value in given_of(server_args).items():
        if is_without_effect(field, drafts):
            raise ValueError(f"{algorithm}: {_flag(field)} {value} would have no effect, leave it out")


def _refuse_wrong_shape(algorithm: str, server_args: ServerArgs) -> None:
    """The tree's shape follows from --specstore-nodes alone."""
    nodes = load_options().nodes
    given = server_args._raw_input
    width = given["speculative_num_draft_tokens"]
    if width not in (None, nodes + 1):
        raise ValueError(
            f"--speculative-num-draft-tokens {width} contradicts --specstore-nodes {nodes}: "
            f"the tree's root counts, give {nodes + 1} or leave it out"
        )
    for field in ("speculative_num_steps", "speculative_eagle_topk"):
        if given[field] is not None:
            raise ValueError(f"{algorithm}: {_flag(field)} {given[field]} is not used, leave it out")


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
