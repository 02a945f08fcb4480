"""The method MIRROR: an early exit of the target says what it expects while it still verifies, and the draft model drafts after that."""

from sglang_patches.methods.mirror.expected_outcomes import ExpectedOutcomes
from sglang_patches.methods.mirror.width import MOST, choices_of

__all__ = ["MOST", "ExpectedOutcomes", "choices_of"]
