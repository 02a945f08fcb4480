"""Files and arguments that are wrong in ways their formats permit: one line that names file, place and limit, no traceback."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from typer.testing import CliRunner

from datastore_service.cli.main import app
from datastore_service.protocol.types import Namespace
from tests.unit.server.service import running
from tests.unit.storage.conftest import WORDS, write_tokenizer

HUGE = 99999999999999999999999
IDS = "is outside [0, 2147483648)"
LINES = {
    "huge.jsonl": (b'{"text": "a"}\n{"text": [1, 2, %d]}\n' % HUGE, f"line 2: id {HUGE} {IDS}"),
    "negative.jsonl": (b'{"text": [1, -1]}', f"line 1: id -1 {IDS}"),
    "digits.jsonl": (b'{"text": [%s]}' % (b"9" * 5000), "line 1: not JSON: an integer of more than 4300 digits"),
    "surrogate.jsonl": (b'{"text": "\\ud800 x"}', "line 1: not text: lone surrogate U+D800 at character 1"),
    "nested.jsonl": (b"\n" + b"[" * 200_000, "line 2: not JSON: nested too deeply"),
    "json.jsonl": (b'{"text": "a"}\n{"text": \n', "line 2: not JSON: Expecting value at character 11"),
    "binary.jsonl": (b'{"text": "a"}\n\x93NUMPY\xff', "line 2: not UTF-8: invalid start byte at byte 1"),
    "binary.txt": (b"a b\xff", "file: not UTF-8: invalid start byte at byte 4"),
    "empty.npy": (b"", "file: not an .npy array: "),
    "header.npy": (b"\x93NUMPY\x01\x00\x08\x00{'descr'", "file: not an .npy array: "),
    "zip.npy": (b"PK\x03\x04" + bytes(40), "file: not an .npy array: "),
}  # fmt: skip
MODELS = {
    '{"model": {"merges": 5}}': "model.merges: not a list of strings or of lists of strings",
    '{"model": {"merges": null}}': "model.merges: not a list",
    '{"model": {"merges": [["a", 1]]}}': "model.merges: not a list",
    '{"model": {}, "added_tokens": 5}': "added_tokens: not a list of objects with a number `id`",
    '{"model": {}, "added_tokens": [1]}': "added_tokens: not a list",
    '{"model": {}, "added_tokens": [{"id": "x"}]}': "added_tokens: not a list",
    '{"model": 5}': "model: missing",
    "[" * 200_000: "file: not JSON: nested too deeply",
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    for name, (content, _) in LINES.items():
        (folder / name).write_bytes(content)
    parquet.write_table(
        pa.table({"text": pa.array([[1], [2**63]], pa.list_(pa.uint64()))}), folder / "huge.parquet"
    )
    np.save(folder / "huge.npy", np.array([1, 2**63], np.uint64))
    (folder / "mark.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a b"}\n')
    (folder / "mark.txt").write_bytes(b"\xef\xbb\xbfa b")
    for i, content in enumerate(MODELS):
        (folder / f"model{i}.json").write_text(content)
    (folder / "unloadable.json").write_text('{"model": {"type": "no such", "merges": []}}')
    (folder / "wordless.json").write_text(
        json.dumps({"model": {"type": "WordLevel", "vocab": {}, "unk_token": "x"}, "version": "1.0"})
    )
    write_tokenizer(folder / "tokenizer", WORDS)
    return folder


MESSAGES = {name: message for name, (_, message) in LINES.items()} | {
    "huge.parquet": f"row 2: id {2**63} {IDS}",
    "huge.npy": f"document 1: tokens: id {2**63} is outside [0, ",
}
LOADING = {f"model{i}.json": message for i, message in enumerate(MODELS.values())}


def run(*words: object):
    return CliRunner().invoke(app, list(map(str, words)))


def assert_one_line(done, *parts: object, status: int = 1) -> None:
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == status, done.stderr
    assert done.stderr.startswith("specstore: ") and done.stderr.count("\n") == 1, done.stderr
    for part in parts:
        assert str(part) in done.stderr


@pytest.fixture(scope="module")
def service(corpora):
    with running(corpora=corpora) as service:
        yield service


@pytest.mark.parametrize(("name", "message"), MESSAGES.items())
def test_a_bad_corpus_is_named_by_build(corpora, tmp_path, name, message):
    done = run("build", corpora / name, "--out", tmp_path / "out", "--tokenizer", corpora / "tokenizer")
    assert_one_line(done, f"{corpora / name}: {message}")


@pytest.mark.parametrize(("name", "message"), MESSAGES.items())
def test_a_bad_corpus_is_named_by_warmup_here_and_there(corpora, service, name, message):
    words = ("warmup", "--model", "m", "--tokenizer", corpora / "tokenizer", "--endpoint", service.endpoint)
    assert_one_line(run(*words, corpora / name), f"{name}: {message}")
    there = ("--server-file", name, "--server-tokenizer", "tokenizer")
    assert_one_line(run(*words, *there), "specstore: file: ", name, message)


@pytest.mark.parametrize(("name", "message"), LOADING.items())
def test_a_bad_tokenizer_is_named(corpora, service, tmp_path, name, message):
    expected = f"{corpora / name}: {message}"
    assert_one_line(run("fingerprint", corpora / name), expected)
    out = ("--out", tmp_path / "out")
    assert_one_line(run("build", corpora / "mark.txt", *out, "--tokenizer", corpora / name), expected)
    at = ("--model", "m", "--endpoint", service.endpoint)
    assert_one_line(run("warmup", corpora / "mark.txt", "--tokenizer", corpora / name, *at), expected)
    assert_one_line(run("query", "a", "--tokenizer", corpora / name, *at), expected)
    there = ("--server-file", "mark.txt", "--server-tokenizer", name)
    done = run("warmup", "--tokenizer", "ab" * 32, *there, *at)
    assert_one_line(done, "specstore: tokenizer: ", name, message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unloadable.json", "unloadable.json: tokenizer: cannot be read: "),
        ("wordless.json", "the tokenizer cannot encode it: WordLevel error: "),
    ],
)
def test_a_tokenizer_that_has_a_fingerprint_and_no_use(corpora, service, tmp_path, name, message):
    fingerprint = run("fingerprint", corpora / name).stdout.strip()
    tokenizer = ("--tokenizer", corpora / name)
    assert_one_line(run("build", corpora / "mark.txt", "--out", tmp_path / "out", *tokenizer), message)
    at = ("--model", name, "--endpoint", service.endpoint)
    assert_one_line(run("warmup", corpora / "mark.txt", *tokenizer, *at), message)
    assert_one_line(run("query", "a", *tokenizer, *at), message, status=2 if name == "wordless.json" else 1)
    there = ("--server-file", "mark.txt", "--server-tokenizer", name)
    done = run("warmup", "--tokenizer", fingerprint, *there, *at)
    assert_one_line(done, "specstore: ", message.removeprefix(f"{name}: "))


@pytest.mark.parametrize("name", ["upper.JSONL", "mixed.JsonL"])
def test_the_case_of_a_name_s_end_does_not_matter(corpora, tmp_path, name):
    (tmp_path / name).write_text('{"other": "a b"}\n')
    done = run("build", tmp_path / name, "--out", tmp_path / "out", "--tokenizer", corpora / "tokenizer")
    assert_one_line(done, f"{tmp_path / name}: line 1: ")


@pytest.mark.parametrize(
    ("name", "message"),
    [("folder", "is a folder; name its files"), ("one.json", "one JSON value is no corpus")],
)
def test_what_is_no_corpus(corpora, service, tmp_path, name, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "one.json").write_text('[{"text": "a b"}]')
    words = ("--tokenizer", corpora / "tokenizer")
    assert_one_line(
        run("build", tmp_path / name, "--out", tmp_path / "out", *words), f"{name}: file: {message}"
    )
    at = ("--model", "m", "--endpoint", service.endpoint)
    assert_one_line(run("warmup", tmp_path / name, *words, *at), f"{name}: file: {message}")


@pytest.mark.parametrize("name", ["mark.jsonl", "mark.txt"])
def test_a_byte_order_mark_is_no_text(corpora, tmp_path, name):
    done = run("build", corpora / name, "--out", tmp_path, "--tokenizer", corpora / "tokenizer", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == 2


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (f"1 {HUGE}", f"context: token id {HUGE} is outside [0, 2147483648)"),
        ("9" * 5000, "context: token id 999999999999999999999999... is outside [0, 2147483648)"),
        ("2147483648", "context: token id 2147483648 is outside [0, 2147483648)"),
    ],
)
def test_a_huge_id_in_a_context(service, context, message):
    at = ("--model", "m", "--tokenizer", "ab" * 32, "--endpoint", service.endpoint)
    assert_one_line(run("query", "--ids", context, *at), message, status=2)


@pytest.mark.parametrize(
    "words", [("--model", "mistyped"), (), ("--model", "known", "--tenant", "none")], ids=str
)
def test_a_question_makes_no_namespace(service, words):
    known = Namespace("known", "cd" * 32)
    service.namespaces.open(known)
    before = list(service.namespaces)
    at = ("--tokenizer", "ab" * 32, "--endpoint", service.endpoint)
    done = run("query", "--ids", "1 2", *at, *words)
    listed = "none" if "--tenant" in words else f"model 'known' with tokenizer '{known.tokenizer}'"
    assert_one_line(done, "specstore: namespace: there is no model ", listed)
    assert list(service.namespaces) == before


def test_a_context_that_is_no_text(corpora, service):
    at = ("--model", "m", "--tokenizer", corpora / "tokenizer", "--endpoint", service.endpoint)
    done = run("query", "a \udcff", *at)  # as Python has the byte 255 of a command line
    assert_one_line(done, "context: not text: lone surrogate U+DCFF at character 3", status=2)
