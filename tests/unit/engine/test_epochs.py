"""Epochs: what older weights have published leaves where it is asked for, and changes no draft until then."""

import numpy as np
import pytest

from datastore_service.engine.engine import Engine
from datastore_service.engine.live.epochs import MOST_KNOWN, Epochs
from datastore_service.engine.provenance import PROVENANCE
from datastore_service.protocol.types import Budget, Entry, Opening
from datastore_service.storage.folder_store import FolderStore, create_folder
from datastore_service.storage.live_manifest import LiveManifest

VOCAB = 1000
CONTEXT = np.arange(100, 108, dtype=np.int32)
SECOND = 1_000_000  # microseconds


def ids(*tokens):
    return np.array(tokens, np.int32)


def writes(name, token, epoch, **said):
    """A whole session whose output says that the token follows the context."""
    opening = Opening(epoch=epoch, **said)
    return Entry(name, 0, np.append(CONTEXT, ids(token)), opening=opening, closing=True)


def asks(epoch=0, name="asker", **said):
    opening = Opening(prompt_length=len(CONTEXT), publish=False, epoch=epoch, **said)
    return Entry(name, 0, CONTEXT, budget=Budget(8, depth=1), opening=opening, closing=True)


def drafted(engine, **said):
    (reply,) = engine.step([asks(**said)])
    return dict(zip(reply.tree.tokens.tolist(), reply.tree.probs.tolist(), strict=True))


def published(*rows):
    """PROVENANCE of documents with these seconds and numbers."""
    return np.array([(0, 0, seconds, 0, number) for seconds, number in rows], PROVENANCE)


def test_an_epoch_never_falls():
    engine = Engine(VOCAB)
    engine.step([writes("a", 1, 5)])
    engine.step([writes("b", 2, 4), writes("c", 3, 0), asks(3)])
    assert engine.epoch == engine.stats().epoch == 5
    assert engine.keep_epochs(1) == [] and set(drafted(engine)) == {1, 2, 3}


def test_an_update_changes_no_draft():
    """Whose text it is, a session's, a group's or the live tier's."""
    text = np.tile(ids(7, 8, 9, 7, 8, 5), 4)
    engine = Engine(VOCAB)
    named = Opening(prompt_length=4, publish=False, group="g")
    engine.step([Entry("own", 0, text, opening=named), Entry("sibling", 0, text[::-1].copy(), opening=named)])
    engine.step([writes("other", 9, 0)])
    asked = Entry("own", len(text), budget=Budget(8))

    def answers():
        (reply,) = engine.step([asked])
        return reply.tree.tokens.tolist(), reply.tree.probs.tolist()

    before = answers(), drafted(engine)
    assert all(before)
    engine.step([asks(9)])
    assert engine.epoch == 9 and (answers(), drafted(engine)) == before


def test_keeping_epochs_removes_the_text_of_older_ones():
    engine = Engine(VOCAB)
    for epoch in range(4):
        engine.step([writes(f"s{epoch}", 10 + epoch, epoch)])
    assert set(drafted(engine)) == {10, 11, 12, 13}
    assert [document[-1] for document in engine.keep_epochs(2)] == [10, 11]
    assert set(drafted(engine)) == {12, 13} and engine.keep_epochs(2) == []
    assert [document[-1] for document in engine.keep_epochs(1)] == [12]
    assert set(drafted(engine)) == {13}
    with pytest.raises(ValueError, match=r"keep: 0 is below 1"):
        engine.keep_epochs(0)


def test_a_session_that_was_open_during_an_update_writes_text_of_the_new_epoch():
    engine = Engine(VOCAB)
    engine.step([Entry("long", 0, CONTEXT, opening=Opening())])
    engine.step([writes("new", 2, 1)])
    engine.step([Entry("long", len(CONTEXT), ids(1), closing=True)])
    assert engine.keep_epochs(1) == [] and set(drafted(engine)) == {1, 2}


def test_without_an_update_nothing_is_old():
    engine = Engine(VOCAB)
    engine.step([writes("a", 1, 0)])
    assert engine.epoch == 0 and engine.keep_epochs(1) == [] and set(drafted(engine)) == {1}


def test_a_flush_leaves_the_epoch():
    engine = Engine(VOCAB)
    engine.step([writes("a", 1, 3)])
    engine.flush()
    assert engine.epoch == 3 and drafted(engine) == {}


def test_after_a_restart_what_was_stored_is_one_epoch_old(tmp_path):
    folder = tmp_path / "live"
    create_folder(folder, LiveManifest("m", "ab" * 32, "", VOCAB))

    def opened():
        return Engine(VOCAB, store=FolderStore(folder, tmp_path / "snapshots"))

    engine = opened()
    engine.step([writes("a", 1, 3), writes("b", 2, 4)])
    engine.close()
    engine = opened()
    assert engine.epoch == 0 and set(drafted(engine)) == {1, 2}
    engine.step([writes("c", 3, 4)])
    assert engine.keep_epochs(2) == []
    assert len(engine.keep_epochs(1)) == 2 and set(drafted(engine)) == {3}
    engine.close()


class TestEpochs:
    epochs = Epochs().begin(3, 50 * SECOND).begin(4, 60 * SECOND).begin(8, 70 * SECOND)

    def test_a_number_says_the_epoch(self):
        told = published(*((0, n * SECOND) for n in (49, 50, 59, 60, 69, 70, 99)))
        assert self.epochs.ages(told).tolist() == [6, 5, 5, 4, 4, 0, 0]

    def test_text_without_a_number_has_its_time(self):
        assert self.epochs.ages(published((49, 0), (50, 0), (70, 0))).tolist() == [6, 5, 0]

    def test_only_so_many_are_known(self):
        epochs = Epochs()
        for epoch in range(1, MOST_KNOWN + 10):
            epochs = epochs.begin(epoch, epoch * SECOND)
        assert len(epochs.begun) == MOST_KNOWN and epochs.current == MOST_KNOWN + 9
        assert epochs.ages(published((0, SECOND))).tolist() == [MOST_KNOWN]
