"""One byte changed, anywhere in anything that is stored: refused at the start with the file's name, or, while the service
runs, taken out where all can see it."""

import json
import logging

import numpy as np
import pytest

from datastore_service.engine import segment
from datastore_service.engine.engine import Engine
from datastore_service.engine.limits import Limits
from datastore_service.engine.live import merge_policy
from datastore_service.engine.segment import build_segment, damaged
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening
from datastore_service.server.engine_factory import engine_factory
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.namespaces import Namespaces
from datastore_service.storage.errors import StorageError
from datastore_service.storage.folder_store import FolderStore, create_folder
from datastore_service.storage.live_manifest import LiveManifest, read_live_manifest
from datastore_service.storage.manifest import (
    MANIFEST,
    Manifest,
    open_segments,
    read_manifest,
    write_manifest,
)
from datastore_service.storage.segment_file import SegmentFile, write_segment
from datastore_service.storage.upgrade import upgrade_segments
from tests.damage import flipped, overwrite
from tests.live_text import documents_of

FINGERPRINT = "ab" * 32
VOCAB = 70_000  # four bytes a token
BITS = (0x01, 0x80, 0xFF)
DOCUMENTS = [np.arange(n, n + 12) for n in range(0, 60, 6)]


@pytest.fixture
def prior(tmp_path):
    folder = tmp_path / "prior"
    folder.mkdir()
    write_segment(folder / "0.seg", build_segment(DOCUMENTS, VOCAB), FINGERPRINT)
    write_manifest(folder, Manifest(FINGERPRINT, VOCAB, ("0.seg",)))
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(merge_policy, "FRESH_TOKENS", 64)
    create_folder(tmp_path / "live", LiveManifest("m", FINGERPRINT, "", VOCAB))
    return tmp_path / "live"


def opened(folder):
    return Engine(
        VOCAB, limits=Limits(live_tokens=1 << 16), store=FolderStore(folder, folder.parent / "snapshots")
    )


@pytest.fixture
def tier(folder):
    """An engine whose live tier is three segments of one document each."""
    engine = opened(folder)
    for begin in (100, 200, 300):
        engine.warmup([np.arange(begin, begin + 50)])
    return engine


def segment_files(folder):
    return [folder / name for name in read_live_manifest(folder).segments]


def offsets(path):
    return range(path.stat().st_size)


@pytest.mark.parametrize("bits", BITS)
def test_every_byte_of_a_prior_s_segment_counts(prior, bits):
    path = prior / "0.seg"
    for at in offsets(path):
        with flipped(path, at, bits), pytest.raises(StorageError, match=r"0\.seg: .+"):
            open_segments(prior)
    assert len(open_segments(prior)) == 1


def test_a_service_does_not_begin_with_a_damaged_prior(prior):
    for at in (20, 128, 700, prior.joinpath("0.seg").stat().st_size - 1):
        with flipped(prior / "0.seg", at, 1), pytest.raises(StorageError, match=r"0\.seg: "):
            engine_factory(prior, VOCAB)


@pytest.mark.parametrize("bits", BITS)
def test_every_byte_of_a_prior_s_manifest_counts(prior, bits):
    path = prior / MANIFEST
    for at in offsets(path):
        with flipped(path, at, bits), pytest.raises(StorageError, match=MANIFEST):
            read_manifest(prior)


def test_a_prior_s_manifest_of_format_1_is_read_and_upgraded(prior):
    """It had no checksum; what decides whether the right text is drafted stands in the segments too."""
    path = prior / MANIFEST
    fields = json.loads(path.read_text())
    del fields["checksum"]
    path.write_text(json.dumps(fields | {"format": 1}))
    assert len(open_segments(prior)) == 1
    for change in ({"vocab_size": VOCAB + 1}, {"tokenizer": "cd" * 32}, {"segments": ["1.seg"]}):
        path.write_text(json.dumps(fields | {"format": 1} | change))
        with pytest.raises(StorageError, match="0\\.seg: (vocab_size|tokenizer): |1\\.seg: file: "):
            open_segments(prior)
    path.write_text(json.dumps(fields | {"format": 1, "checksum": 0}))
    with pytest.raises(StorageError, match="format: 1 has no checksum"):
        read_manifest(prior)
    path.write_text(json.dumps(fields | {"format": 1}))
    assert upgrade_segments(prior) == 0
    assert json.loads(path.read_text())["format"] == 2
    assert len(open_segments(prior)) == 1


@pytest.mark.parametrize("bits", BITS)
def test_every_byte_of_a_live_tier_s_segment_counts(tier, folder, bits):
    path = segment_files(folder)[1]
    for at in offsets(path):
        with flipped(path, at, bits), pytest.raises(StorageError, match=rf"{path.name}: .+"):
            FolderStore(folder, folder.parent / "snapshots").recover()
    assert documents_of(opened(folder)) == documents_of(tier)


def levels_of_segments(caplog):
    """Of what was logged of them: a thread of another test may log too."""
    return [record.levelname for record in caplog.records if record.name == segment.__name__]


class TestWhileItRuns:
    """The file changes under a service that has it mapped."""

    @pytest.fixture
    def spoilt(self, tier, folder):
        """The second segment's first token is another one."""
        path = segment_files(folder)[1]
        overwrite(path, 128, (60_000).to_bytes(4, "little"))
        return tier, path

    @pytest.mark.parametrize("action", [Engine.compact, lambda engine: engine.snapshot("kept")])
    def test_nothing_is_made_of_a_damaged_segment(self, spoilt, folder, action, caplog):
        engine, path = spoilt
        action(engine)
        assert 60_000 not in sum(documents_of(engine), [])
        assert sorted(document[0] for document in documents_of(engine)) == [100, 300]
        of_live = engine.stats().tiers[Tier.LIVE]
        assert (of_live.damaged, of_live.tokens) == (1, 100)
        engine.compact()
        lines = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
        assert lines == [f"segment taken out: {path}: tokens: checksum does not match, the file is damaged"]
        assert engine.stats().merge_failures == 0
        with pytest.raises(StorageError, match=f"{path.name}: tokens: checksum"):
            opened(folder)  # it stays listed: what was acknowledged is not lost in silence

    @pytest.mark.parametrize("action", ["flush", "restore"])
    def test_an_operator_lets_go_of_it(self, spoilt, folder, action):
        engine, path = spoilt
        engine.snapshot("kept")
        if action == "flush":
            engine.flush(Tier.LIVE)
        else:
            engine.restore("kept")
        assert engine.stats().tiers[Tier.LIVE].damaged == 0
        assert not path.exists()
        assert [d[0] for d in documents_of(opened(folder))] == ([] if action == "flush" else [100, 300])

    def test_a_damaged_prior_is_taken_out(self, prior, caplog):
        engine = Engine(VOCAB, open_segments(prior))
        assert damaged(engine.segments()) == set()
        overwrite(prior / "0.seg", 128, b"\x07")
        found = damaged(engine.segments())
        engine.take_out(found)
        engine.take_out(found)
        of_prior = engine.stats().tiers[Tier.PRIOR]
        assert (of_prior.damaged, of_prior.segments, of_prior.tokens) == (1, 0, 0)
        assert levels_of_segments(caplog) == ["ERROR"]
        engine.set_prior(())
        assert engine.stats().tiers[Tier.PRIOR].damaged == 0

    def test_namespaces_share_the_prior_and_its_damage(self, prior, caplog):
        namespaces = Namespaces(engine_factory(prior, VOCAB), ServiceLimits())
        first = namespaces.open(Namespace("m", FINGERPRINT))
        overwrite(prior / "0.seg", 128, b"\x07")
        namespaces.check_segments()
        namespaces.check_segments()
        later = namespaces.open(Namespace("m", FINGERPRINT, "tenant"))
        assert [hosted.engine.stats().tiers[Tier.PRIOR].damaged for hosted in (first, later)] == [1, 1]
        assert levels_of_segments(caplog) == ["ERROR"]

    def test_whatever_the_bytes_are_drafts_are_token_ids(self, prior):
        """Between the damage and its discovery."""
        path, random = prior / "0.seg", np.random.default_rng(0)
        whole = path.read_bytes()
        engine = Engine(VOCAB, [SegmentFile(path).segment])
        drafted = 0
        for trial in range(300):
            size = int(random.integers(1, 200))
            at = int(random.integers(128, len(whole) - size))
            overwrite(path, at, b"\xff" * size if trial % 2 else random.bytes(size))
            tokens = np.arange(8, 8 + trial % 40, dtype=np.int32)
            entry = Entry("s", 0, tokens, budget=Budget(32), opening=Opening(publish=False), closing=True)
            tree = engine.step([entry])[0].tree
            assert not len(tree) or 0 <= tree.tokens.min() <= tree.tokens.max() < VOCAB
            drafted += len(tree)
            overwrite(path, 0, whole)
        assert drafted > 1000
