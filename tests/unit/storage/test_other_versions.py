"""A folder with a file of another version, as an upgrade or a rollback may meet it: refused, and left as it is."""

import json
import shutil
import struct

import numpy as np
import pytest

from datastore_service.engine.engine import Engine
from datastore_service.engine.live import merge_policy
from datastore_service.protocol.types import Entry, Opening
from datastore_service.storage.errors import StorageError
from datastore_service.storage.folder_store import FolderStore, create_folder
from datastore_service.storage.live_manifest import MANIFEST, LiveManifest

VOCAB = 1000
VERSION_AT = 8  # of segments and logs, after the magic


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With a segment, a log, and a leftover of an interrupted process, which a start would remove."""
    monkeypatch.setattr(merge_policy, "FRESH_TOKENS", 64)
    live = tmp_path / "live"
    create_folder(live, LiveManifest("m", "ab" * 32, "", VOCAB))
    engine = opened(live)
    publish(engine, range(20))
    engine.compact()  # into a segment
    publish(engine, range(2))  # into a log
    engine.close()
    (live / "00000000.log.tmp").write_bytes(b"unfinished")
    assert {path.suffix for path in live.iterdir()} == {".json", ".seg", ".prov", ".log", ".tmp"}
    return live


def opened(folder):
    return Engine(VOCAB, store=FolderStore(folder, folder.parent / "snapshots"))


def publish(engine, numbers):
    for number in numbers:
        text = np.arange(number, number + 10, dtype=np.int32)
        engine.step([Entry("s", 0, text, opening=Opening(), closing=True)])


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def set_format(path):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 9}))


def set_version(path):
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, VERSION_AT, 9)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        (".json", set_format, f"{MANIFEST}: format: 9, this program reads 1 to 2: start the specstore that wrote it"),
        (".log", set_version, "version: 9, this program reads 1 to 4: start the specstore that wrote it"),
        (".prov", set_version, "version: 9, this program reads 1 to 2"),
        (".seg", set_version, "version: 9, this program reads 2"),
    ],
)  # fmt: skip
def test_it_is_refused_by_name_and_left_as_it_is(suffix, change, message, folder):
    changed = max(path for path in folder.iterdir() if path.suffix == suffix)
    intact = shutil.copytree(folder, folder.with_name("intact"))
    change(changed)
    before = contents(folder)
    with pytest.raises(StorageError, match=message) as refused:
        opened(folder)
    assert refused.value.path == changed
    assert contents(folder) == before
    assert opened(intact).stats().tiers  # nothing else was wrong
