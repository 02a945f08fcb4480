"""Compares a method's answers with plain decoding's: they differ where plain decoding was undecided, or they are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_patches.check.results import OK

# A difference counts as rounding if plain decoding itself was undecided there: the two tokens are this close in log-probability.
# The bounds are chosen; on an H100 bfloat16 parted at up to 0.25 (docs/compatibility.md). The table counts the differences within them.
ROUNDING_LOGPROB = {"float32": 1e-4, "bfloat16": 0.3, "float16": 0.1}


class Answer(NamedTuple):
    """One answer. prompt: tokens of its prompt. tokens: ids. logprobs: of each token. margins: at each token the likeliest one's
    log-probability over the second likeliest one's. The last two are empty where they were not asked for."""

    prompt: int
    tokens: list[int]
    logprobs: list[float]
    margins: list[float]


@dataclass(frozen=True)
class Answers:
    """Answers of one engine to the same prompts, perhaps several rounds of them; lists by answer, with the fields of `Answer`.

    tokens_per_step: of all answers, after the first token of each, which is the prefill's.
    accepted: drafted tokens in the answers, by who proposed them.
    """

    dtype: str
    prompts: list[int]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    margins: list[list[float]]
    tokens_per_step: float
    accepted: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Answer:
        return Answer(self.prompts[index], self.tokens[index], self.logprobs[index], self.margins[index])


# By how much plain decoding preferred its own token where another engine's answer leaves its answer: plain, ours, index of the token.
Margin = Callable[[Answer, Answer, int], float]


def greedy_margin(plain: Answer, ours: Answer, at: int) -> float:
    """The likeliest token's log-probability over the second likeliest one's: no other token lies closer. Needs plain decoding's
    log-probabilities."""
    return plain.margins[at]


def noise_margin(seed: int) -> Margin:
    """Makes the margin of tokens that are drawn with the noise of `seed`. It is the distance between the two tokens' log-probabilities,
    each with its token's noise. Needs both engines' log-probabilities."""
    import torch

    from sglang_patches.verification.shared_noise import exponentials

    def margin(plain: Answer, ours: Answer, at: int) -> float:
        preferred, other = plain.tokens[at], ours.tokens[at]
        drawn_at = torch.tensor([plain.prompt + at])
        noise = exponentials(torch.tensor([seed]), drawn_at, max(preferred, other) + 1)[0].log().neg()
        return abs(plain.logprobs[at] + float(noise[preferred]) - ours.logprobs[at] - float(noise[other]))

    return margin


def compare(plain: Answers, ours: Answers, margin: Margin) -> tuple[str, list[float]]:
    """The state of a row, and the margins where answers part. Both have answered the same prompts, ours perhaps in more rounds."""
    pairs = [(plain[index % len(plain)], ours[index]) for index in range(len(ours))]
    margins = [of for pair in pairs if (of := _margin_of(*pair, margin)) is not None]
    allowed = ROUNDING_LOGPROB.get(plain.dtype, 0.0)
    wrong = [of for of in margins if not of <= allowed]
    if not wrong:
        return (f"{OK}, {len(margins)} of {len(ours)} answers part by rounding" if margins else OK), margins
    return (
        f"{len(wrong)} of {len(ours)} answers differ by more than rounding: plain decoding preferred its token by up to "
        f"{max(wrong):.3g} in log-probability, {plain.dtype} explains {allowed:.3g}"
    ), margins


def _margin_of(plain: Answer, ours: Answer, margin: Margin) -> float | None:
    """None for equal answers. No rounding makes an answer end early or late."""
    at = first_difference(plain.tokens, ours.tokens)
    if at is None:
        return None
    return math.inf if at == min(len(plain.tokens), len(ours.tokens)) else margin(plain, ours, at)


def first_difference(plain: Sequence[int], ours: Sequence[int]) -> int | None:
    """The index of the first token that differs. Where one answer is the beginning of the other, the shorter one's length."""
    for index, (left, right) in enumerate(zip(plain, ours, strict=False)):
        if left != right:
            return index
    return None if len(plain) == len(ours) else min(len(plain), len(ours))
