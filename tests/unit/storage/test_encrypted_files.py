"""Files that are encrypted: the documented format, and what is refused after any change."""

import errno
import os
import struct
import zlib

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from datastore_service.engine.provenance import provenance_of
from datastore_service.engine.segment import build_segment
from datastore_service.protocol.types import Namespace, Opening
from datastore_service.storage import encrypted_file
from datastore_service.storage.encrypted_file import verify_encrypted
from datastore_service.storage.encryption_keys import UNENCRYPTED, OperatorKeys
from datastore_service.storage.errors import StorageError
from datastore_service.storage.live_segment import read_provenance, write_provenance
from datastore_service.storage.log import LogWriter, complete_bytes, read_log
from datastore_service.storage.segment_file import SegmentFile, open_verified, write_segment

FINGERPRINT = "ab" * 32
VOCAB = 300
NAMESPACE = Namespace("m", FINGERPRINT, "t")
SECRET = bytes(range(32))
OPERATOR = OperatorKeys({"k1": SECRET}, "keys")
KEYS = OPERATOR.of(NAMESPACE)
DOCUMENTS = [[1, 2, 3], [299], [4, 5, 6], [0, 0]]
WHOSE = provenance_of(Opening(conversation="c", user="u"), published=7)
HEADERS, ENCRYPTED_HEADER = 64 + 88, 88
RECORD = 12 + 8 + 40 + 16  # beside the tokens
PART = 256


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(encrypted_file, "PART", PART)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "00000001.log"


def written(path, keys=KEYS, documents=DOCUMENTS):
    writer = LogWriter(path, FINGERPRINT, VOCAB, keys)
    for document in documents:
        writer.append(np.array(document, np.int32), WHOSE)
    writer.close()
    return path.read_bytes()


def read(path, keys=KEYS):
    contents = read_log(path, FINGERPRINT, VOCAB, keys)
    return [document.tolist() for document, _ in contents.documents], contents.torn


def segment_at(path, keys=KEYS):
    segment = build_segment([np.arange(250), np.arange(7)], VOCAB)
    write_segment(path, segment, FINGERPRINT, keys)
    return segment


def flips(data):
    for at in range(len(data)):
        yield at, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def by_the_documentation(header, kind):
    """A cipher for what follows a header, and how many bytes do."""
    magic, version, name, salt, length, tag, checksum = struct.unpack("<8sI16s32sQ16sI", header)
    assert (magic, version, name.rstrip(b"\0")) == (b"SPECENC\0", 1, b"k1")
    assert checksum == zlib.crc32(header[:-4])
    info = b'["specstore namespace", "m", "' + FINGERPRINT.encode() + b'", "t"]'
    of_namespace = HKDF(SHA256(), 32, None, info).derive(SECRET)
    cipher = AESGCM(HKDF(SHA256(), 32, salt, b"file " + kind).derive(of_namespace))
    cipher.decrypt(bytes(12), tag, header[:68])
    return cipher, length


def nonce(number):
    return number.to_bytes(12, "little")


def test_a_whole_file_is_as_documented(tmp_path):
    segment_at(tmp_path / "1.seg", UNENCRYPTED)
    plain = (tmp_path / "1.seg").read_bytes()
    segment_at(tmp_path / "1.seg")
    data = (tmp_path / "1.seg").read_bytes()
    cipher, length = by_the_documentation(data[:ENCRYPTED_HEADER], b".seg")
    found, at = b"", ENCRYPTED_HEADER
    for number in range(1, -(-length // PART) + 1):
        size = min(PART, length - len(found)) + 16
        part = data[at + 4 : at + 4 + size]
        assert data[at : at + 4] == zlib.crc32(part).to_bytes(4, "little")
        found += cipher.decrypt(nonce(number), part, b"")
        at += 4 + size
    assert (found, at) == (plain, len(data))


def test_a_log_is_as_documented(path):
    data = written(path)
    assert data[8:12] == (4).to_bytes(4, "little")
    cipher, length = by_the_documentation(data[64:HEADERS], b"00000001.log")
    at, found = HEADERS, []
    while at < len(data):
        size, _, checksum = struct.unpack_from("<III", data, at)
        payload = data[at + 12 : at + 12 + size]
        assert checksum == zlib.crc32(payload)
        number = int.from_bytes(payload[:8], "little")
        plain = cipher.decrypt(nonce(number), payload[8:], at.to_bytes(8, "little"))
        found.append((number, plain[:40], np.frombuffer(plain[40:], "<u2").tolist()))
        at += 12 + size
    assert length == 0
    assert found == [(i, WHOSE.tobytes(), document) for i, document in enumerate(DOCUMENTS, 1)]


def test_no_two_files_have_one_key(path, tmp_path):
    for name in ("1.seg", "2.seg"):
        segment_at(tmp_path / name)
    first, second = ((tmp_path / name).read_bytes() for name in ("1.seg", "2.seg"))
    assert first[28:60] != second[28:60], "the salt"
    cipher, _ = by_the_documentation(second[:ENCRYPTED_HEADER], b".seg")
    with pytest.raises(InvalidTag):
        cipher.decrypt(nonce(1), first[ENCRYPTED_HEADER + 4 : ENCRYPTED_HEADER + 4 + PART + 16], b"")


def test_no_two_namespaces_have_one_key():
    names = [NAMESPACE, Namespace("m", FINGERPRINT, "u"), Namespace("n", FINGERPRINT, "t")]
    names += [Namespace("m", "cd" * 32, "t"), Namespace("mt", FINGERPRINT, "")]
    assert len({OPERATOR.of(name).secrets["k1"] for name in names} | {SECRET}) == 6


def test_a_log_cut_anywhere_has_the_records_before_the_cut(path):
    data = written(path)
    ends = HEADERS + np.cumsum([0, *(RECORD + 2 * len(document) for document in DOCUMENTS)])
    assert ends[-1] == len(data)
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        whole = int((ends[1:] <= size).sum())
        torn = size - int(ends[whole]) if size >= HEADERS else size
        assert read(path) == (DOCUMENTS[:whole], torn)
        complete = complete_bytes(path, data[:size], FINGERPRINT, VOCAB)
        assert complete == (size - torn), "also without a key"


def test_a_changed_byte_of_a_log_is_named(path):
    for at, changed in flips(written(path)):
        path.write_bytes(changed)
        with pytest.raises(StorageError, match=str(path)):
            read(path)
        with pytest.raises(StorageError, match="offset" if at >= HEADERS else path.name):
            complete_bytes(path, changed, FINGERPRINT, VOCAB)


def framed(payload):
    length = struct.pack("<I", len(payload))
    return length + struct.pack("<II", zlib.crc32(length), zlib.crc32(payload)) + payload


def test_records_cannot_be_moved(path, tmp_path):
    """Whoever moves them can make the checksums right."""
    size = RECORD + 6
    data, log = written(path), tmp_path / "00000002.log"
    other = written(log)
    first = slice(HEADERS, HEADERS + size)
    second = slice(first.stop, first.stop + RECORD + 2)
    third = slice(second.stop, second.stop + size)
    exchanged = data[: first.start] + data[third] + data[second] + data[first] + data[third.stop :]
    repeated = data + data[first]
    changed = data[:HEADERS] + framed(data[first][12:-1] + bytes([data[first][-1] ^ 1])) + data[first.stop :]
    cases = {HEADERS: [exchanged, changed, data[:HEADERS] + other[HEADERS:]], len(data): [repeated]}
    for offset, made in [(offset, each) for offset, several in cases.items() for each in several]:
        path.write_bytes(made)
        with pytest.raises(StorageError, match=f"{path}: offset {offset}: does not authenticate"):
            read(path)
    path.write_bytes(other)
    with pytest.raises(StorageError, match="key: 'k1' of keys is not .* or it is a file of another place"):
        read(path)


def test_a_record_is_never_encrypted_as_one_before_it(path, monkeypatch):
    """One that could not be written is on the disk for a while, at the same place."""
    writer = LogWriter(path, FINGERPRINT, VOCAB, KEYS)
    real, seen = os.write, []

    def refused(descriptor, data):
        seen.append(bytes(data))
        return real(descriptor, data[: len(data) - 3])

    with monkeypatch.context() as full:
        full.setattr(os, "write", refused)
        for document in ([1, 2, 3], [4, 5, 6]):
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                writer.append(np.array(document, np.int32), WHOSE)
    writer.append(np.array([7, 8, 9], np.int32), WHOSE)
    writer.close()
    seen.append(path.read_bytes())
    numbers = [int.from_bytes(data[HEADERS + 12 : HEADERS + 20], "little") for data in seen]
    assert numbers == [1, 2, 3]
    assert read(path) == ([[7, 8, 9]], 0)


def test_a_changed_byte_of_a_whole_file_is_named_also_without_a_key(tmp_path):
    path = tmp_path / "1.seg"
    segment_at(path)
    for _, changed in flips(path.read_bytes()):
        path.write_bytes(changed)
        with path.open("rb") as file, pytest.raises(StorageError, match=str(path)):
            if changed.startswith(b"SPECENC\0"):
                verify_encrypted(file, path)
            open_verified(path, FINGERPRINT, VOCAB, KEYS)
        with pytest.raises(StorageError, match=str(path)):
            open_verified(path, FINGERPRINT, VOCAB, KEYS)


def test_parts_cannot_be_moved(tmp_path):
    path = tmp_path / "1.seg"
    segment_at(path)
    data, size = path.read_bytes(), 4 + PART + 16
    first, second = data[ENCRYPTED_HEADER:][:size], data[ENCRYPTED_HEADER + size :][:size]
    path.write_bytes(data[:ENCRYPTED_HEADER] + second + first + data[ENCRYPTED_HEADER + 2 * size :])
    with path.open("rb") as file:
        verify_encrypted(file, path)  # the checksums are right
    with pytest.raises(StorageError, match=f"offset {ENCRYPTED_HEADER}: does not authenticate"):
        open_verified(path, FINGERPRINT, VOCAB, KEYS)
    path.write_bytes(data[:-size])
    with pytest.raises(StorageError, match="length: .* the header says"):
        open_verified(path, FINGERPRINT, VOCAB, KEYS)


def test_a_segment_comes_back_in_memory(tmp_path):
    path = tmp_path / "1.seg"
    segment = segment_at(path)
    file = open_verified(path, FINGERPRINT, VOCAB, KEYS)
    path.unlink()
    assert len(file) == 257
    for name in ("tokens", "suffixes", "offsets", "keys"):
        array = getattr(file.segment, name)
        assert np.array_equal(array, getattr(segment, name))
        assert not array.flags.writeable and array.flags.aligned
    assert file.segment.damage() == ""


def test_provenance_comes_back(tmp_path):
    provenance = np.concatenate([WHOSE] * 20)
    write_provenance(tmp_path / "1.seg", provenance, KEYS)
    assert np.array_equal(read_provenance(tmp_path / "1.prov", KEYS), provenance)
    (tmp_path / "1.prov").rename(tmp_path / "1.seg")
    with pytest.raises(StorageError, match="a file of another place"):
        SegmentFile(tmp_path / "1.seg", FINGERPRINT, KEYS)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (UNENCRYPTED, "key: encrypted with the key 'k1', give it with --encryption-keys"),
        (
            OperatorKeys({"k2": SECRET}, "f").of(NAMESPACE),
            "key: encrypted with the key 'k1', which f has not",
        ),
        (OperatorKeys({"k1": bytes(32)}, "f").of(NAMESPACE), "key: 'k1' of f is not the key"),
        (OPERATOR.of(Namespace("m", FINGERPRINT, "u")), "key: 'k1' of keys is not the key"),
    ],
    ids=["none", "missing", "wrong", "another tenant's"],
)
def test_the_key_is_named(path, tmp_path, keys, why):
    written(path)
    segment_at(tmp_path / "1.seg")
    write_provenance(tmp_path / "1.seg", WHOSE, KEYS)
    readers = {
        path: read,
        tmp_path / "1.seg": lambda path, keys: SegmentFile(path, FINGERPRINT, keys),
        tmp_path / "1.prov": read_provenance,
    }
    for file, reader in readers.items():
        with pytest.raises(StorageError) as caught:
            reader(file, keys)
        assert str(caught.value).startswith(f"{file}: {why}")
