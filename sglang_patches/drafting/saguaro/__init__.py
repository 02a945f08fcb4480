"""SAGUARO (Kumar et al., Speculative Speculative Decoding, section 4)."""

from sglang_patches.drafting.saguaro.fallback import SaguaroFallback, WaitingFallback, fallback_of
from sglang_patches.drafting.saguaro.fan_out import GeometricFanOut
from sglang_patches.drafting.saguaro.rollouts import Rollouts

__all__ = ["GeometricFanOut", "Rollouts", "SaguaroFallback", "WaitingFallback", "fallback_of"]
