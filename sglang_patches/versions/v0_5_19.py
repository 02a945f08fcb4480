"""SGLang 0.5.19: as 0.5.20, but its report does not count the correct drafts, its sampler draws tokens and no more, and there is one
model with KDA layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_patches.versions import v0_5_20
from sglang_patches.versions.rows import changed

if TYPE_CHECKING:
    import torch
    from sglang.srt.configs.model_config import ModelConfig

COUNTS_CORRECT_DRAFTS = False

ROWS = changed(
    v0_5_20.ROWS,
    without=(v0_5_20.ACCEPT_RATE, "sglang.srt.configs.hybrid_arch.glm5_next_config"),
)


def hybrid_kda_config(config: ModelConfig) -> object | None:
    """The configuration of a model with KDA layers, None for another model."""
    from sglang.srt.configs.hybrid_arch import kimi_linear_config

    return kimi_linear_config(config)


def as_draw(tokens: torch.Tensor) -> object:
    """Drawn tokens as `Sampler._sample_from_probs` returns them."""
    return tokens


def drawn(result: Any) -> torch.Tensor:
    """The tokens in such a result."""
    return result


def __getattr__(name: str) -> Any:
    """All else is as in 0.5.20."""
    return getattr(v0_5_20, name)
