"""One best-first planner in place of K, F, gamma and theta: the draft model is run where that is worth the most for its time."""

from sglang_patches.methods.planner.branches import Branches
from sglang_patches.methods.planner.outcomes import LikeliestOutcomes
from sglang_patches.methods.planner.row_choice import RowsByValue

__all__ = ["Branches", "LikeliestOutcomes", "RowsByValue"]
