"""WarmupFile over real gRPC: which names it takes, what it reads, what it says of the rest."""

import json
import os

import grpc
import numpy as np
import pytest

from datastore_service.client.channel import open_channel
from datastore_service.engine.limits import Limits
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Budget, Entry, Opening
from datastore_service.server import warmup
from datastore_service.server.corpora import Corpora
from datastore_service.server.refusal import RefusalError
from datastore_service.storage.fingerprint import tokenizer_fingerprint
from proto_gen.specstore.v1 import admin_pb2 as pb
from proto_gen.specstore.v1.admin_pb2_grpc import AdminStub
from tests.unit.server.service import running
from tests.unit.storage.conftest import WORDS, write_tokenizer

DOCUMENTS = [" ".join(WORDS[1:6]), " ".join(WORDS[3:9])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of corpora; beside it lies a file that nobody may name."""
    data = tmp_path_factory.mktemp("data")
    (data / "secret.jsonl").write_text('{"text": "a"}\n')
    corpora = data / "corpora"
    corpora.mkdir()
    write_tokenizer(corpora / "model", WORDS)
    lines = [json.dumps({"text": text}) + "\n" for text in DOCUMENTS]
    (corpora / "more").mkdir()
    (corpora / "more" / "texts.jsonl").write_text("".join(lines))
    (corpora / "broken.jsonl").write_text("".join(lines) + "{\n")
    np.save(corpora / "ids.npy", np.arange(10, 40).reshape(3, 10))
    np.save(corpora / "large.npy", np.array([1, 2, 1000]))
    os.symlink("more/texts.jsonl", corpora / "inside.jsonl")
    os.symlink(data / "secret.jsonl", corpora / "outside.jsonl")
    os.symlink("loop", corpora / "loop")
    os.mkfifo(corpora / "pipe")
    return corpora


@pytest.fixture(scope="module")
def service(folder):
    with running(corpora=folder, engine_limits=Limits(live_tokens=30)) as service:
        yield service


@pytest.fixture
def stub(service):
    with open_channel(service.endpoint) as channel:
        yield AdminStub(channel)
    for hosted in service.namespaces:
        service.namespaces.drop(hosted)


@pytest.fixture(scope="module")
def namespace(folder):
    return {"model": "m", "tokenizer": tokenizer_fingerprint(folder / "model")}


def added(stub, **fields) -> list[tuple[int, int]]:
    """(documents, tokens) of each message."""
    return [(reply.documents, reply.tokens) for reply in stub.WarmupFile(pb.WarmupFileRequest(**fields))]


def refusal(stub, **fields) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as error:
        added(stub, **fields)
    return error.value.code().name, error.value.details()


@pytest.mark.parametrize("name", ["more/texts.jsonl", "inside.jsonl", "./more//texts.jsonl"])
@pytest.mark.parametrize("tokenizer", ["model", "model/tokenizer.json"])
def test_texts_with_the_namespace_s_tokenizer(stub, service, namespace, name, tokenizer):
    assert added(stub, namespace=namespace, file=name, tokenizer=tokenizer) == [(2, 11)]
    (hosted,) = service.namespaces
    tokens = np.array([1, 2], np.int32)
    (reply,) = hosted.engine.step(
        [Entry("s", tokens=tokens, budget=Budget(3), opening=Opening(publish=False))]
    )
    hosted.engine.flush(session="s")
    assert reply.tree.tokens.tolist() == [3, 4, 5]


def test_ids_need_no_tokenizer_and_parts_are_told_as_they_are_added(stub, namespace, monkeypatch):
    monkeypatch.setattr(warmup, "SEGMENT_TOKENS", 20)
    assert added(stub, namespace=namespace, file="ids.npy") == [(2, 20), (3, 30)]


def test_what_was_added_before_a_bad_part_stays(stub, service, namespace, monkeypatch):
    monkeypatch.setattr(warmup, "SEGMENT_TOKENS", 1)
    monkeypatch.setattr("datastore_service.storage.corpus._BATCH_CHARACTERS", 1)
    code, details = refusal(stub, namespace=namespace, file="broken.jsonl", tokenizer="model")
    assert code == "INVALID_ARGUMENT"
    assert details.startswith("file: ") and "line 3" in details
    (hosted,) = service.namespaces
    assert hosted.engine.stats().tiers[Tier.LIVE].tokens == 5


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"file": ""}, "INVALID_ARGUMENT", "file: empty"),
        ({"file": "x" * 1025}, "INVALID_ARGUMENT", "file: 1025 bytes exceeds 1024"),
        ({"file": "../secret.jsonl"}, "INVALID_ARGUMENT", "file: '../secret.jsonl' is not a path below corpora/"),
        ({"file": "more/../../secret.jsonl"}, "INVALID_ARGUMENT", "file: 'more/../../secret.jsonl' is not a path"),
        ({"file": "/etc/passwd"}, "INVALID_ARGUMENT", "file: '/etc/passwd' is not a path below corpora/"),
        ({"file": "a\0b"}, "INVALID_ARGUMENT", "file: 'a\\x00b' is not a path below corpora/"),
        ({"file": "outside.jsonl"}, "INVALID_ARGUMENT", "file: 'outside.jsonl' leads out of corpora/"),
        ({"file": "loop"}, "NOT_FOUND", "file: 'loop' in corpora/: Too many levels of symbolic links"),
        ({"file": "gone.jsonl"}, "NOT_FOUND", "file: 'gone.jsonl' in corpora/: No such file or directory"),
        ({"file": "more"}, "INVALID_ARGUMENT", "file: 'more' in corpora/ is not a file"),
        ({"file": "pipe"}, "INVALID_ARGUMENT", "file: 'pipe' in corpora/ is not a file"),
        ({"file": "inside.jsonl"}, "INVALID_ARGUMENT", "file: 'inside.jsonl': document 1: is text"),
        ({"file": "inside.jsonl", "field": "x", "tokenizer": "model"}, "INVALID_ARGUMENT", "file: 'inside.jsonl': line 1"),
        ({"file": "large.npy"}, "INVALID_ARGUMENT", "file: 'large.npy': document 1: "),
        ({"file": "inside.jsonl", "tokenizer": "../x"}, "INVALID_ARGUMENT", "tokenizer: '../x' is not a path"),
        ({"file": "inside.jsonl", "tokenizer": "more"}, "NOT_FOUND", "tokenizer: 'more/tokenizer.json' in corpora/"),
        ({"file": "inside.jsonl", "tokenizer": "ids.npy"}, "INVALID_ARGUMENT", "tokenizer: 'ids.npy': file: not JSON"),
    ],
)  # fmt: skip
def test_refusals_name_the_field_and_no_path_of_the_host(
    stub, service, namespace, folder, fields, code, message
):
    status, details = refusal(stub, namespace=namespace, **fields)
    assert (status, details[: len(message)]) == (code, message)
    assert str(folder.parent) not in details
    assert sum(hosted.engine.stats().tiers[Tier.LIVE].tokens for hosted in service.namespaces) == 0


def test_a_tokenizer_of_another_namespace_is_refused(stub, namespace):
    other = namespace | {"tokenizer": "f" * 64}
    code, details = refusal(stub, namespace=other, file="inside.jsonl", tokenizer="model")
    assert code == "FAILED_PRECONDITION"
    assert details == f"tokenizer: 'model' is {namespace['tokenizer']}, the namespace's '{'f' * 64}'"


def test_more_than_the_live_tier_holds(stub, namespace, folder):
    np.save(folder / "many.npy", np.arange(31))
    code, details = refusal(stub, namespace=namespace, file="many.npy")
    assert code == "RESOURCE_EXHAUSTED" and details.startswith("documents: 31 tokens exceed live_tokens")


def test_a_service_without_data_has_no_corpora():
    with pytest.raises(RefusalError, match="^file: the service has no --data directory") as refused:
        Corpora(None).find("x", "file")
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION


def test_a_token_is_asked_for_here_too(folder):
    with running(token="secret", corpora=folder) as service, open_channel(service.endpoint) as channel:
        code, _ = refusal(AdminStub(channel), file="ids.npy")
    assert code == "UNAUTHENTICATED"
