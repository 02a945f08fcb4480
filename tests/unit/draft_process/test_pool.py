"""A KV cache that is too small for all texts: most sessions are drafted for, and the draft process never spins."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sglang")

from sglang_patches.draft_process import model as process_model  # noqa: E402
from sglang_patches.draft_process.limits import NOT_TAKEN  # noqa: E402
from sglang_patches.draft_process.model import SglangModel  # noqa: E402
from sglang_patches.draft_process.sequences import IDLE_SECONDS, SPARE  # noqa: E402
from sglang_patches.draft_side.side import DraftParts, DraftSide, Learner  # noqa: E402
from sglang_patches.exchange.messages import Committed, Growth, Opened, Verifying  # noqa: E402
from sglang_patches.ledger.rates import SpeedRatio  # noqa: E402
from sglang_patches.methods.saguaro import (
    GeometricFanOut,  # noqa: E402
    Rollouts,  # noqa: E402
)
from tests.unit.draft_process.test_model import VOCABULARY, Runner  # noqa: E402
from tests.unit.draft_process.test_sequences import Clock  # noqa: E402

CONTEXT, CHUNK, ROWS, SESSIONS = 4000, 64, 24, 40
NONE = np.empty(0, np.int64)


class Told(SpeedRatio):
    """Remembers how many forwards it was told of."""

    forwards = 0

    def forward_took(self, seconds: float) -> None:
        self.forwards += 1
        super().forward_took(seconds)


class Drafting:
    """A draft side over SGLang's model, whose runner is replaced."""

    def __init__(self, slots: int, serial: bool = False) -> None:
        self.clock, self.ratio = Clock(), Told()
        runner = Runner(CONTEXT, slots, SESSIONS)
        self.model = SglangModel(runner, ROWS, CHUNK, VOCABULARY, self.clock)
        self.forwards = self.decodes = 0
        self.prefills: list[list[int]] = []  # tokens of each text
        self._forward, runner.forward = runner.forward, self._counted
        parts = DraftParts(lambda: Learner(GeometricFanOut(), Rollouts(4)), ratio=self.ratio)
        self.side = DraftSide(self.model, parts, ROWS, ROWS, serial)
        self.lengths: dict[str, int] = {}

    def _counted(self, batch):
        self.forwards += 1
        self.decodes += batch.forward_mode.is_decode()
        if batch.forward_mode.is_extend():
            self.prefills.append(batch.extend_seq_lens_cpu)
        return self._forward(batch)

    def open(self, session: str, length: int) -> None:
        self.lengths[session] = length
        self.side.hear([Opened(session, np.ones(length, np.int32), 1)])

    def commit(self, session: str, count: int, epoch: int) -> None:
        tokens = np.full(count, 2, np.int32)
        self.side.hear(
            [Committed(session, self.lengths[session], tokens, epoch), self.verifying(session, epoch)]
        )
        self.lengths[session] += count

    @staticmethod
    def verifying(session: str, epoch: int = 1) -> Verifying:
        return Verifying(session, epoch, NONE, NONE, NONE.astype(np.int32))

    def work(self) -> set[str]:
        """The sessions that got drafts, until there is nothing to do."""
        found = set()
        for _ in range(500):
            answers = self.side.work()
            if answers is None:
                return found
            found |= {answer.session for answer in answers if isinstance(answer, Growth)}
        raise AssertionError("it spins")


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(process_model.host, "place_kv", lambda runner, batch: None)


def counted(counter, *labels):
    return counter.labels(*labels)._value.get()


def test_a_text_that_no_pool_of_this_size_can_hold_is_refused_and_the_others_are_drafted_for():
    drafting, before = Drafting(slots=1500), counted(NOT_TAKEN, "length")
    drafting.open("long", 2600)
    for at in range(8):
        drafting.open(f"s{at}", 20 + at)
    assert drafting.work() == {f"s{at}" for at in range(8)}
    assert counted(NOT_TAKEN, "length") == before + 1


def test_one_long_prompt_makes_room_for_many_short_ones():
    drafting = Drafting(slots=1500)
    drafting.open("long", 1300)
    assert drafting.work() == {"long"}
    for at in range(8):
        drafting.open(f"s{at}", 20 + at)
    assert drafting.work() == {f"s{at}" for at in range(8)}


def test_short_prompts_do_not_wait_for_a_long_one_before_them():
    """Whose prefill takes many rounds."""
    drafting = Drafting(slots=8000)
    drafting.open("long", 3000)
    for at in range(4):
        drafting.open(f"s{at}", 40)
    drafted: list[str] = []
    for _ in range(8):
        drafted += [answer.session for answer in drafting.side.work() or ()]
    assert {*drafted} == {f"s{at}" for at in range(4)}
    assert drafting.work() >= {"long"}


def test_a_chunk_holds_the_texts_of_several_sessions():
    """At a large batch each would else wait for a round of its own."""
    drafting = Drafting(slots=8000)
    for at in range(8):
        drafting.open(f"s{at}", 21)
    assert drafting.work() == {f"s{at}" for at in range(8)}
    # Of the fourth and the seventh the first has one token too many for rows of a forward.
    assert drafting.prefills == [[20, 20, 20, 4], [16, 20, 20, 8], [20]]


def test_a_text_whose_room_another_one_of_the_chunk_was_given_is_not_run():
    drafting = Drafting(slots=800)
    drafting.open("long", 620)
    while (left := 619 - sum(map(sum, drafting.prefills))) >= CHUNK:
        drafting.side.work()
    drafting.open("short", 80)  # with 128 slots for its drafts there is no room beside the long one
    drafting.side.work()
    assert 0 < left < 79 and drafting.prefills[-1] == [CHUNK - left]


def test_a_pool_that_fills_up_while_texts_grow_neither_spins_nor_says_that_forwards_are_fast():
    drafting = Drafting(slots=1000)
    sessions = [f"s{at}" for at in range(6)]
    for session in sessions:
        drafting.open(session, 90)
    for epoch in range(2, 40):
        drafted = drafting.work()
        assert drafted and 0 < drafting.ratio.forwards <= drafting.decodes
        for session in sessions:
            drafting.commit(session, 8, epoch)
    assert len(drafted) in (2, 3), "as many as there is room for"


def test_a_session_that_is_still_wanted_but_not_run_makes_room():
    """SGLang has retracted it, say."""
    drafting = Drafting(slots=1000)
    drafting.open("idle", 500)
    assert drafting.work() == {"idle"}
    drafting.open("next", 400)
    assert drafting.work() == set()
    drafting.clock.now += IDLE_SECONDS
    assert drafting.side.waits_for_room and drafting.work() == {"next"}


def test_nothing_is_prefilled_on_the_target_s_device_while_it_verifies():
    drafting = Drafting(slots=1000, serial=True)
    drafting.open("verified", 10)
    drafting.open("new", 10 + SPARE)
    drafting.side.hear([drafting.verifying("verified")])
    assert drafting.work() == set() and drafting.forwards == 0
    drafting.side.hear([Committed("verified", 10, np.full(1, 3, np.int32), 2)])
    assert drafting.work() == {"verified", "new"}
