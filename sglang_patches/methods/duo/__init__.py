"""DUO (Lv et al., DuoDecoding): several sequences after the verified draft, as many as the draft model is unsure."""

from sglang_patches.methods.duo.heads import Heads
from sglang_patches.methods.duo.sequences import Sequences

__all__ = ["Heads", "Sequences"]
