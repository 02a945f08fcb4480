"""Which of SGLang's attention backends verify a draft tree.

A row of a tree may attend only to the cached text, its ancestors and itself. Only some backends honour that mask, for some
models and page sizes. The others verify wrong tokens without an error. `choose` runs while SGLang resolves its arguments: it
refuses a wrong backend that the user named and replaces a wrong default. docs/compatibility.md has the table of its decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, mamba2_config, mambaish_config
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.runtime_context import get_spec

from sglang_patches.cpu import ATTENTION_BACKEND as CPU_BACKEND
from sglang_patches.host.versions import host

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

# With one branch a level, fa3 and fa4 verify a causal chain and hybrid layers read no tree links.
BRANCHES = 2
FALLBACK = "triton"  # honours the mask for every model it can serve
# Backends that plan each step by its own width. The others plan every step by the widest.
ANY_WIDTH_BACKENDS = frozenset({"triton", "flashinfer", CPU_BACKEND})


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """The properties of a model that decide which backend can verify its trees."""

    mla: bool = False
    sliding_window: bool = False
    attention_chunks: bool = False
    attention_sinks: bool = False


def _any_model(model: ModelTraits, page_size: int) -> str | None:
    return None


def _flashinfer(model: ModelTraits, page_size: int) -> str | None:
    if model.mla:
        return "its kernels for multi-head latent attention take no tree mask"
    if model.sliding_window:
        return "with a sliding window its tree mask is longer than its keys"
    return "it has no attention sinks" if model.attention_sinks else None


def _flash_attention(model: ModelTraits, page_size: int) -> str | None:
    if page_size != 1:
        return f"its trees need --page-size 1, not {page_size}"
    if model.attention_chunks:
        return "its trees leave out chunked local attention"
    return "its trees leave out attention sinks" if model.attention_sinks else None


# Backend -> why it cannot verify trees of this model with this page size, None where it can.
_TREE_BACKENDS: dict[str, Callable[[ModelTraits, int], str | None]] = {
    "triton": _any_model,
    "flashinfer": _flashinfer,
    "fa3": _flash_attention,
    "fa4": _flash_attention,
    CPU_BACKEND: _any_model,
    "intel_amx": _any_model,
}
_PAGE_SIZE_ONE = frozenset({"fa3", "fa4"})
# Defaults that SGLang picks for their speed on a card. Any other default is the only backend for its model.
_REPLACEABLE = frozenset(
    {"aiter", "cutedsl_mla", "fa3", "fa4", "flashinfer", "flashmla", "trtllm_mha", "trtllm_mla"}
)


def why_unfit(backend: str, model: ModelTraits, page_size: int) -> str | None:
    """Why this backend cannot verify trees, None when it can."""
    if backend not in _TREE_BACKENDS:
        return "it takes no tree mask"
    return _TREE_BACKENDS[backend](model, page_size)


def traits_of(config: ModelConfig, mla: bool) -> ModelTraits:
    """The traits that the model's configuration alone tells: no weights, no model class."""
    chunks = config.attention_chunk_size is not None
    layers = getattr(config.hf_text_config, "layer_types", None) or ()
    return ModelTraits(
        mla=mla,
        sliding_window=bool(config.is_hybrid_swa) or chunks or "sliding_attention" in layers,
        attention_chunks=chunks,
        attention_sinks=config.has_attention_sinks,
    )


@dataclass(frozen=True, slots=True)
class _Setting:
    """The field that decides which backend verifies."""

    field: str
    backend: str
    named: bool  # by the user

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")


def _verifying_setting(server_args: ServerArgs) -> _Setting:
    """SGLang verifies with the prefill backend unless speculative_attention_mode is decode."""
    view = resolved_view(server_args)
    split_field = f"{view.speculative_attention_mode}_attention_backend"
    field = split_field if getattr(view, split_field) else "attention_backend"
    return _Setting(field, getattr(view, field), named=server_args._raw_input[field] is not None)


def verifying_backend() -> str:
    """Name of the backend that serves target-verify forwards in this process. The configuration must be published."""
    prefill, decode = host.attention_backends()
    return decode if get_spec().speculative_attention_mode == "decode" else prefill


def traits_of_loaded(runner: ModelRunner) -> ModelTraits:
    """The traits of the loaded model: only its class knows for sure whether it has a sliding window."""
    config, window = runner.model_config, runner.sliding_window_size
    return ModelTraits(
        mla=runner.use_mla_backend,
        sliding_window=window is not None and window > 0,
        attention_chunks=config.attention_chunk_size is not None,
        attention_sinks=config.has_attention_sinks,
    )


def refuse_unfit(runner: ModelRunner) -> None:
    """Raises RuntimeError that names the verifying backend if it cannot verify trees of the loaded model."""
    backend = verifying_backend()
    reason = why_unfit(backend, traits_of_loaded(runner), runner.page_size)
    if reason is not None:
        raise RuntimeError(
            f"specstore: attention backend {backend} cannot verify draft trees of this model: {reason}; "
            f"give --attention-backend {FALLBACK}"
        )


def verifies_chains_only(runner: ModelRunner) -> bool:
    """Whether the verifying backend gets only chains of this model right. With a sliding window `triton` uses a row's number as its
    depth. The two are equal only in a chain. In a tree, rows off the first path miss the oldest keys of the window."""
    return verifying_backend() == "triton" and traits_of_loaded(runner).sliding_window


def verifies_trees(runner: ModelRunner, branches: int) -> bool:
    """Whether the verifying backend and the layers of the loaded model get trees right.

    branches: of SGLang's configuration, in a level. With one, fa3 and fa4 verify a causal chain and hybrid layers read no tree links.
    """
    if why_unfit(verifying_backend(), traits_of_loaded(runner), runner.page_size) is not None:
        return False
    if verifies_chains_only(runner):
        return False
    return branches > 1 or not (verifying_backend() in _PAGE_SIZE_ONE or mambaish_config(runner.model_config))


def choose(algorithm: str, server_args: ServerArgs) -> dict[str, object]:
    """The fields to change so that the verifying backend honours trees, often none.

    Raises ValueError that names the flag of an unusable backend given by the user, or the backend that the model needs.
    """
    config = host.model_config_of(server_args)
    _refuse_linear_attention(algorithm, config, resolved_view(server_args).device)
    setting = _verifying_setting(server_args)
    given_page_size = server_args._raw_input["page_size"]
    traits = traits_of(config, config.attention_arch == AttentionArch.MLA)
    reason = why_unfit(setting.backend, traits, given_page_size or 1)
    # If the user gave no page size, SGLang may have set one for the backend that is replaced here.
    page_size = {"page_size": given_page_size or 1}
    if reason is None:
        return page_size if setting.backend in _PAGE_SIZE_ONE else {}
    if setting.named:
        raise ValueError(
            f"{algorithm}: {setting.flag} {setting.backend} cannot verify draft trees of this model: {reason}; "
            f"leave it out or give {FALLBACK}"
        )
    if setting.backend not in _REPLACEABLE:
        raise ValueError(f"{algorithm}: this model runs on attention backend {setting.backend}: {reason}")
    return {setting.field: FALLBACK} | page_size


def _refuse_linear_attention(algorithm: str, config: ModelConfig, device: str) -> None:
    """Accepts a model with linear-attention layers only if the layers follow tree links."""
    if not mambaish_config(config):
        return
    if not (mamba2_config(config) or hybrid_gdn_config(config) or host.hybrid_kda_config(config)):
        raise ValueError(f"{algorithm}: the linear-attention layers of this model cannot verify draft trees")
    if device == "cpu":
        raise ValueError(
            f"{algorithm}: there are no CPU kernels for the linear-attention layers of this model"
        )
