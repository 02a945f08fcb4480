"""A service with encryption keys: what is on its disk at any time, and what a kill, another key and a restore make of it."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest

from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Entry, Opening
from sglang_patches.launch.processes import ChildDiedError
from tests.damage import flipped
from tests.integration.datastore.conftest import VOCAB, specstore
from tests.integration.datastore.test_crash import ANSWER_SECONDS, NAME, NAMESPACE, is_proposed
from tests.support.servers.datastore import DatastoreService

FORMAT = Path(__file__).parents[3] / "docs" / "storage-format.md"
MAGIC = b"SPECENC\0"
OUTPUTS = np.random.default_rng(0).integers(0, VOCAB, (40, 40), dtype=np.int32)
WARMED = np.random.default_rng(1).integers(0, VOCAB, (40, 40), dtype=np.int32)
FORGOTTEN = slice(1, None, 4)


class Machine:
    """A disk with a data directory, a key file and backups. A key is 32 times one byte."""

    def __init__(self, root: Path) -> None:
        self.root, self.data, self.backups = root, root / "data", root / "backups"
        self.keys = root / "keys"
        self.data.mkdir()

    def write_keys(self, **keys: int) -> None:
        lines = (f"{name} {base64.b64encode(bytes([value] * 32)).decode()}\n" for name, value in keys.items())
        self.keys.write_text("".join(lines))
        self.keys.chmod(0o600)

    def service(self, data: Path | None = None, encrypted: bool = True) -> DatastoreService:
        flags = ("--encryption-keys", self.keys) if encrypted else ()
        return DatastoreService(self.root / "log", "--data", data or self.data, "--vocab-size", VOCAB, *flags)

    def refusal(self, **how: bool) -> str:
        """What a start that fails says last."""
        with pytest.raises(ChildDiedError), self.service(**how):
            pass
        return (self.root / "log").read_text().splitlines()[-1]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def connected(service):
    datastore = GrpcDatastore(service.endpoint, NAMESPACE)
    assert datastore.wait_connected(ANSWER_SECONDS)
    return datastore


def proposed(service):
    datastore = connected(service)
    found = [is_proposed(datastore, output) for output in (*OUTPUTS, *WARMED)]
    datastore.close()
    return found


def fill(service, folder):
    """Writes a file of each kind: a log, segments, a snapshot, a quota."""
    at = ("--endpoint", service.endpoint)
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps({"ids": row.tolist()}) + "\n" for row in WARMED))
    done = [specstore("warmup", texts, "--field", "ids", *NAME, *at)]
    texts.unlink()
    datastore = connected(service)
    for number, output in enumerate(OUTPUTS):
        opening = Opening(user=f"u{number % 4}")
        datastore.step([Entry("s", tokens=output, opening=opening, closing=True)], ANSWER_SECONDS)
        if number == 20:
            done.append(specstore("snapshot", "a", *NAME, *at))
    datastore.close()
    done.append(specstore("quota", "set", "--tenant", "other", "--sessions", 3, *at))
    assert [process.returncode for process in done] == [0] * 3, [process.stderr for process in done]


def keys_in(folder: Path) -> set[str]:
    """The names of the keys of all files but those that are documented as never encrypted; none has a part of a text."""
    section = FORMAT.read_text().split("## Encryption", 1)[1].split("\n## ", 1)[0]
    never = {Path(name).name for name in re.findall(r"`([^`]+\.json)`", section)}
    patterns = [
        row[:12].astype(kind).tobytes() for row in (*OUTPUTS, *WARMED) for kind in ("<u2", "<i4", "<i8")
    ]
    keys = set()
    for path in (path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        assert not any(pattern in data for pattern in patterns), path
        if path.name not in never and not ("*.json" in never and _is_list(path, data)):
            at = data[:100].find(MAGIC)
            keys.add(data[at + 12 : at + 28].rstrip(b"\0").decode() if at in (0, 64) else f"none: {path}")
    return keys


def _is_list(path: Path, data: bytes) -> bool:
    """Whether it is a backup's list of files, or a file that is stored as it is because it is never encrypted."""
    return path.parent.name in ("backups", "objects") and data.startswith(b"{")


def test_what_a_killed_service_has_answered_is_there_and_on_no_disk_readable(machine):
    machine.write_keys(k1=1)
    with machine.service() as service:
        fill(service, machine.root)
        assert keys_in(machine.data) == {"k1"}
        service.kill()
        assert keys_in(machine.data) == {"k1"}
        service.start()
        assert proposed(service) == [True] * 80
        said = specstore("forget", "--subject", "user:u1", "--verify", "--endpoint", service.endpoint).stdout
        assert "none of the subjects is left" in said
        service.kill()
        assert specstore("backup", machine.data, machine.backups).returncode == 0, "without the key"
        assert keys_in(machine.data) == keys_in(machine.backups) == {"k1"}
    copy = machine.root / "copy"
    refused = specstore("restore-backup", machine.backups, copy)
    assert refused.returncode == 1
    assert "key: encrypted with the key 'k1', give it with --encryption-keys" in refused.stderr
    machine.write_keys(k2=2, k1=1)
    restored = specstore("restore-backup", machine.backups, copy, "--encryption-keys", machine.keys)
    assert restored.returncode == 0, restored.stderr
    assert keys_in(copy) == {"k2"}
    with machine.service(copy) as service:
        expected = [number % 4 != 1 for number in range(40)] + [True] * 40
        assert proposed(service) == expected


def test_keys_come_and_go(machine):
    """From no key to a first one, then to a second, with a kill before each start."""
    with machine.service(encrypted=False) as service:
        fill(service, machine.root)
        service.kill()
    machine.write_keys(k1=1)
    with machine.service() as service:
        assert keys_in(machine.data) == {"k1"}
        assert proposed(service) == [True] * 80
        service.kill()
    assert "key: encrypted with the key 'k1', give it with --encryption-keys" in machine.refusal(
        encrypted=False
    )
    machine.write_keys(k2=2)
    assert f"key: encrypted with the key 'k1', which {machine.keys} has not" in machine.refusal()
    machine.write_keys(k1=3)
    assert f"key: 'k1' of {machine.keys} is not the key of that name" in machine.refusal()
    machine.write_keys(k2=2, k1=1)
    with machine.service() as service:
        assert keys_in(machine.data) == {"k2"}
        service.kill()
    machine.write_keys(k2=2)
    with machine.service() as service:
        assert proposed(service) == [True] * 80
        restored = specstore("restore", "a", *NAME, "--endpoint", service.endpoint)
        assert restored.returncode == 0, restored.stderr
        assert proposed(service) == [True] * 21 + [False] * 19 + [True] * 40


def test_a_flipped_byte_stops_the_start(machine):
    machine.write_keys(k1=1)
    with machine.service() as service:
        fill(service, machine.root)
        service.kill()
    for suffix in (".seg", ".prov", ".log"):
        path = sorted(machine.data.glob(f"live/*/*{suffix}"))[-1]
        with flipped(path, path.stat().st_size // 2, 1):
            refused = machine.refusal()
        assert re.search(rf"{path}: offset \d+: .*the file is damaged", refused)
