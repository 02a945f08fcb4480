"""What the draft process has said: bounded by answers and nodes, the newest stay."""

import numpy as np

from sglang_patches.drafting import mailboxes
from sglang_patches.drafting.mailboxes import Inbox
from sglang_patches.exchange.messages import Growth, Lost


def growth(number, nodes):
    return Growth(
        "s", number, 0, *(np.zeros(nodes, kind) for kind in (np.int64, np.int64, np.int32, np.float32))
    )


def test_answers_come_in_order_and_once():
    box = Inbox()
    answers = [growth(1, 3), Lost("s"), growth(2, 0)]
    assert [box.put(answer) for answer in answers] == [0, 0, 0] and len(box) == 3
    assert box.take() == answers and not box and box.take() == []


def test_many_small_answers_and_few_large_ones_are_bounded(monkeypatch):
    monkeypatch.setattr(mailboxes, "MOST", 30)
    box = Inbox()
    assert sum(box.put(Lost(str(i))) for i in range(50)) == 20
    assert box.put(growth(1, 19)) == 20 and len(box) == 11
    assert box.put(growth(2, 1000)) == 12 and box.take() == []
    assert box.put(growth(3, 29)) == 0 and box.put(Lost("s")) == 1
    assert [answer.session for answer in box.take()] == ["s"]
