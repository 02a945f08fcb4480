"""One best-first planner in place of K, F, gamma and theta: the draft model is run where that is worth the most for its time."""

from sglang_patches.drafting.planner.branches import Branches
from sglang_patches.drafting.planner.outcomes import LikeliestOutcomes
from sglang_patches.drafting.planner.row_choice import AllRows, RowChoice, RowsByValue

__all__ = ["AllRows", "Branches", "LikeliestOutcomes", "RowChoice", "RowsByValue"]
