"""SAGUARO (Kumar et al., Speculative Speculative Decoding, section 4)."""

from sglang_patches.methods.saguaro.fallback import SaguaroFallback, WaitingFallback, fallback_of
from sglang_patches.methods.saguaro.fan_out import GeometricFanOut

__all__ = ["GeometricFanOut", "SaguaroFallback", "WaitingFallback", "fallback_of"]
