"""Whether a step waits for the head, or verifies what retrieval alone has found."""

from __future__ import annotations

from sglang_patches.ledger.rates import RunningMean

RATE = 0.05  # of the running means
ALIKE = 20  # values that count alike, before the means run
LEVELS = 8  # of what retrieval promises: each has a mean of its own
PROBE_STEPS = 8  # after so many steps without it, the head drafts again


class HeadWorth:
    """Learns what the head adds to a step, and what it takes.

    A step's tokens are those that its trees are expected to bring, the target's own included, a request.
    """

    def __init__(self) -> None:
        self._gains = [RunningMean(RATE, ALIKE) for _ in range(LEVELS)]
        self._draft, self._step = RunningMean(RATE, ALIKE), RunningMean(RATE, ALIKE)
        self._left_out = 0  # steps in a row
        self._drafted = False  # in this step
        self._last = 1.0  # tokens of the last step's retrieval

    @property
    def doubtful(self) -> bool:
        """Whether retrieval should be heard before the head drafts: after a step in which that alone was worth it."""
        return not self._pays(self._last)

    def pays(self, retrieved: float) -> bool:
        """Whether a step with the head is likely to bring more tokens a second.

        retrieved: tokens of a step with retrieval alone.
        """
        self._last = retrieved
        if self._pays(retrieved) or self._left_out >= PROBE_STEPS:
            self._left_out = 0
            return True
        self._left_out += 1
        return False

    def drafted(self, retrieved: float, united: float, seconds: float) -> None:
        """The head has drafted.

        retrieved, united: tokens of the step with retrieval alone, and with both.
        seconds: that the head's forwards took.
        """
        self._last, self._left_out, self._drafted = retrieved, 0, True
        self._gain(retrieved).add(united - retrieved)
        self._draft.add(seconds)

    def step_took(self, seconds: float) -> None:
        """A step took so long, the head's forwards included if it drafted: others say nothing of what those cost."""
        if self._drafted:
            self._step.add(seconds)
        self._drafted = False

    def _pays(self, retrieved: float) -> bool:
        gain, draft, step = self._gain(retrieved), self._draft.value, self._step.value
        if gain.count < ALIKE or draft >= step:  # nothing is known yet
            return True
        return (retrieved + gain.value) * (step - draft) >= retrieved * step

    def _gain(self, retrieved: float) -> RunningMean:
        return self._gains[min(int(retrieved - 1), LEVELS - 1)]
