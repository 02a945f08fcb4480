"""The commands that ask a service, against one in this process."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from google.protobuf.json_format import ParseDict
from grpc_health.v1 import health_pb2
from typer.testing import CliRunner

from datastore_service.cli.main import app
from datastore_service.client.channel import open_channel
from datastore_service.storage.data_directory import DataDirectory
from proto_gen.specstore.v1 import admin_pb2 as pb
from proto_gen.specstore.v1 import drafting_pb2
from proto_gen.specstore.v1.admin_pb2_grpc import AdminStub
from proto_gen.specstore.v1.drafting_pb2_grpc import DraftingStub
from tests.unit.server.service import VOCAB, running

TOKENIZER = "ab" * 32
NAME = ("--model", "m", "--tokenizer", TOKENIZER)


@pytest.fixture(scope="module")
def service():
    with running() as service:
        yield service


@pytest.fixture
def run(service, monkeypatch):
    """Runs a command on a service whose namespace holds nine tokens."""
    monkeypatch.setattr("datastore_service.cli.admin.HEALTH_SECONDS", 60.0)
    with open_channel(service.endpoint) as channel:
        namespace = {"model": "m", "tokenizer": TOKENIZER}
        documents = [{"tokens": [1, 2, 3, 4]}, {"tokens": [5, 6, 7, 8, 9]}]
        AdminStub(channel).Warmup(iter([pb.WarmupRequest(namespace=namespace, documents=documents)]))

    def run(*words: object):
        return CliRunner().invoke(app, [*map(str, words), "--endpoint", service.endpoint])

    yield run
    for hosted in service.namespaces:
        hosted.engine.flush()
        service.namespaces.drop(hosted)


@pytest.mark.parametrize(
    ("words", "reply"),
    [
        (("stats",), pb.StatsReply),
        (("namespaces",), pb.ListNamespacesReply),
        (("sessions", *NAME), pb.ListSessionsReply),
        (("compact", *NAME), pb.CompactReply),
        (("flush", *NAME, "--all"), pb.FlushReply),
        (("drop-namespace", *NAME), pb.DropNamespaceReply),
        (("health",), health_pb2.HealthCheckResponse),
    ],
)
def test_every_verb_prints_its_reply_as_json(run, words, reply):
    done = run(*words, "--json")
    assert done.exit_code == 0, done.stderr
    ParseDict(json.loads(done.stdout), reply())  # raises for a field that the message lacks


def test_json_says_what_the_sentence_says(run):
    assert json.loads(run("compact", *NAME, "--json").stdout) == {"segments": 1, "tokens": "9"}
    assert run("compact", *NAME).stdout == "live tier: 9 tokens in 1 segments\n"
    assert json.loads(run("health", "--json").stdout) == {"status": "SERVING"}


def test_a_name_is_shown_as_it_is(service, run):
    """Not as rich's markup, which this one would break."""
    with open_channel(service.endpoint) as channel:
        namespace = {"model": "m", "tokenizer": TOKENIZER, "tenant": "[/b]:smile:"}
        AdminStub(channel).Warmup(iter([pb.WarmupRequest(namespace=namespace)]))
    for words in (("namespaces",), ("stats",)):
        done = run(*words)
        assert done.exit_code == 0, done.stderr
        assert "[/b]:smile:" in done.stdout


HOSTILE = "a\x1b[2Jb\x00c\u202ed\u2066e\nf\x9bg"
SHOWN = "a\\x1b[2Jb\\x00c\\u202ed\\u2066e\\nf\\x9bg"


@pytest.mark.parametrize("words", [("namespaces",), ("stats",), ("sessions", *NAME)])
def test_what_a_terminal_would_obey_or_hide_is_escaped(service, run, monkeypatch, words):
    """Any stream chooses such names."""
    monkeypatch.setenv("COLUMNS", "200")
    namespace = {"model": "m", "tokenizer": TOKENIZER}
    with open_channel(service.endpoint) as channel:
        AdminStub(channel).Warmup(iter([pb.WarmupRequest(namespace=namespace | {"tenant": HOSTILE})]))
        entry = drafting_pb2.Entry(session=HOSTILE, opening={"conversation": HOSTILE})
        message = drafting_pb2.DraftRequest(namespace=namespace, entries=[entry])
        (_,) = DraftingStub(channel).Draft(iter([message]))
    done = run(*words)
    assert done.exit_code == 0, done.stderr
    assert SHOWN in done.stdout
    assert all(character.isprintable() or character == "\n" for character in done.stdout)


def test_an_error_shows_names_escaped(run):
    done = run("flush", *NAME, "--tier", HOSTILE)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert done.stderr.strip().isprintable()


FOREIGN = "müller→漢"
OF_FOREIGN = ("--model", FOREIGN, "--tokenizer", TOKENIZER, "--tenant", FOREIGN)
EACH = """
import json, sys
from datastore_service.cli.main import app
for words in json.loads(sys.argv[1]):
    try:
        app(words)
    except SystemExit as end:
        print("ended", words[0], end.code or 0)
"""


def test_a_terminal_that_lacks_a_character_ends_no_command(tmp_path):
    with running(data=DataDirectory(tmp_path, VOCAB)) as service, open_channel(service.endpoint) as channel:
        namespace = {"model": FOREIGN, "tokenizer": TOKENIZER, "tenant": FOREIGN}
        documents = [{"tokens": [1, 2, 3, 4]}]
        AdminStub(channel).Warmup(iter([pb.WarmupRequest(namespace=namespace, documents=documents)]))
        entry = drafting_pb2.Entry(session=FOREIGN, opening={"conversation": FOREIGN})
        (_,) = DraftingStub(channel).Draft(
            iter([drafting_pb2.DraftRequest(namespace=namespace, entries=[entry])])
        )
        commands = [
            *(("stats",), ("namespaces",), ("sessions", *OF_FOREIGN)),
            *(("snapshot", "one", *OF_FOREIGN), ("snapshots", *OF_FOREIGN), ("restore", "one", *OF_FOREIGN)),
            ("query", "1 2", "--ids", *OF_FOREIGN),
            *(("compact", *OF_FOREIGN), ("flush", *OF_FOREIGN, "--session", FOREIGN)),
            *(("drop-namespace", *OF_FOREIGN), ("drop-namespace", *OF_FOREIGN)),
        ]
        words = [(*command, "--endpoint", service.endpoint) for command in commands]
        environment = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "COLUMNS": "200"}
        done = subprocess.run(
            [sys.executable, "-c", EACH, json.dumps(words)], capture_output=True, env=environment, timeout=120
        )
    ends = [line for line in done.stdout.decode("ascii").splitlines() if line.startswith("ended ")]
    expected = [f"ended {command[0]} 0" for command in commands[:-1]] + ["ended drop-namespace 1"]
    assert ends == expected, done.stderr.decode()
    shown = FOREIGN.encode("ascii", "backslashreplace")
    assert done.stdout.count(shown) >= 4 and done.stderr.count(shown) == 2, "of the one that is gone"


def test_warmup_from_a_file_of_the_service(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(7))
    with running(corpora=tmp_path) as service:

        def warmup(*words: object):
            return CliRunner().invoke(
                app, ["warmup", *NAME, *map(str, words), "--endpoint", service.endpoint]
            )

        done = warmup("--server-file", "ids.npy")
        assert (done.exit_code, done.stdout) == (0, "added 1 documents, 7 tokens\n"), done.stderr
        done = warmup("--server-file", "ids.npy", "--json")
        assert json.loads(done.stdout) == {"documents": "1", "tokens": "7"}
        done = warmup("--server-file", "../ids.npy")
        assert done.exit_code == 1 and done.stderr.startswith("specstore: file: '../ids.npy'")
        none, both = warmup(), warmup(tmp_path / "ids.npy", "--server-file", "ids.npy")
        assert (none.exit_code, both.exit_code) == (2, 2)
        assert none.stderr == "specstore: warmup: SOURCES or --server-file is required\n"
        assert both.stderr == "specstore: warmup: SOURCES or --server-file, not both\n"


def test_warmup_of_ids_needs_no_tokenizer(run, tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(7))
    (tmp_path / "text").write_text("some words")
    done = run("warmup", tmp_path / "ids.npy", *NAME, "--json")
    assert json.loads(done.stdout) == {"documents": "1", "tokens": "7"}
    done = run("warmup", tmp_path / "text", *NAME)
    assert done.exit_code == 1 and "is text, which needs a tokenizer" in done.stderr
