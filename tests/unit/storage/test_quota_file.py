"""The file of quotas: what is written is read, and what cannot be one is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from datastore_service.storage.checksummed_json import write_checksummed
from datastore_service.storage.errors import StorageError
from datastore_service.storage.quota_file import FORMAT, Quota, read_quotas, write_quotas

WHOLE = Quota(live_bytes=2**64 - 1, sessions=0, streams=1, outputs_per_second=2, messages_per_second=3)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "quotas.json"


def test_what_is_written_is_read(path):
    quotas = {"": Quota(sessions=3), "\u202e a/b\n": WHOLE, "acme": Quota(live_bytes=5)}
    write_quotas(path, quotas)
    assert read_quotas(path) == quotas
    write_quotas(path, {})
    assert read_quotas(path) == {}


def test_without_a_file_nobody_has_one(path):
    assert read_quotas(path) == {}


@pytest.mark.parametrize(
    ("quotas", "told"),
    [
        ({"a": {"session": 1}}, "quotas: 'session' is not one of live_bytes, sessions, streams, outputs_per_second, messages_per_second"),
        ({"a": {"sessions": "1"}}, "sessions: missing or not int"),
        ({"a": {"sessions": -1}}, "sessions: -1 is below 0"),
        ({"a": {"messages_per_second": 0}}, "quotas: 'a': messages_per_second: 0 is below 1"),
        ({"a": []}, "quotas: 'a': [] is not an object"),
        ([], "quotas: missing or not dict"),
    ],
)  # fmt: skip
def test_what_no_quota_is_like_is_refused(path, quotas, told):
    write_checksummed(path, {"format": FORMAT, "quotas": quotas})
    with pytest.raises(StorageError) as error:
        read_quotas(path)
    assert str(error.value) == f"{path}: {told}"


def test_a_later_format_and_damage_are_refused(path):
    write_checksummed(path, {"format": FORMAT + 1, "quotas": {}})
    with pytest.raises(StorageError, match=f"format: {FORMAT + 1}, but there is only format {FORMAT} yet"):
        read_quotas(path)
    write_quotas(path, {"a": WHOLE})
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"quotas": {}}))
    with pytest.raises(StorageError, match="checksum: does not match"):
        read_quotas(path)
    path.write_text(json.dumps(whole)[:-9])
    with pytest.raises(StorageError, match="not JSON"):
        read_quotas(path)
