"""The file of an operator's keys: what is read, and what is refused without a word of what is in it."""

import base64
import logging

import pytest

from datastore_service.storage.encryption_keys import read_keys

SECRETS = {"2026-11": bytes(range(32)), "2026-01": bytes(32)}
ENCODED = {name: base64.b64encode(secret).decode() for name, secret in SECRETS.items()}
SHORT = base64.b64encode(bytes(range(31))).decode()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "keys"
    path.touch(0o600)
    return path


def test_the_first_key_encrypts(path):
    path.write_text("# keys\n\n" + "".join(f"{name}  {key} # of a year\n" for name, key in ENCODED.items()))
    keys = read_keys(path)
    assert list(keys.secrets.items()) == list(SECRETS.items())
    assert keys.source == str(path)
    assert SECRETS["2026-11"].hex() not in repr(keys) and str(SECRETS["2026-11"]) not in repr(keys)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no key in it"),
        ("# a\n", "no key in it"),
        (f"a {ENCODED['2026-11']}\n{ENCODED['2026-11']}\n", "line 2: 1 words, not a name and a key"),
        (f"a {ENCODED['2026-11']} b", "line 1: 3 words, not a name and a key"),
        (
            f"\n{ENCODED['2026-11']} a",
            "line 2: a name has 1 to 16 letters, digits, dots, dashes and underscores",
        ),
        (f"{'a' * 17} {ENCODED['2026-11']}", "line 1: a name has 1 to 16 letters"),
        (f"a {ENCODED['2026-11']}!", "line 1: the key is not base64"),
        (f"a {SHORT}", "line 1: the key has 31 bytes, not 32"),
        (f"a {ENCODED['2026-11']}\na {ENCODED['2026-01']}", "two keys have one name"),
        (f"ä {ENCODED['2026-11']}", "not ASCII"),
    ],
)
def test_a_wrong_file_is_refused_by_its_line(path, text, why):
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_keys(path)
    assert str(caught.value).startswith(f"encryption-keys: {path}: {why}")
    assert ENCODED["2026-11"] not in str(caught.value) and SHORT not in str(caught.value)


@pytest.mark.parametrize(("mode", "lines"), [(0o600, 0), (0o440, 0), (0o644, 1), (0o601, 1)])
def test_a_file_that_everybody_may_read_is_in_the_log(path, caplog, mode, lines):
    path.write_text(f"a {ENCODED['2026-11']}")
    path.chmod(mode)
    with caplog.at_level(logging.WARNING):
        read_keys(path)
    assert caplog.text.count("every user of this machine may read") == lines
