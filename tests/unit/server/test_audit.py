"""The audit: who did or was refused what, in lines of a file or of the service's log."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Iterator
from logging.handlers import WatchedFileHandler
from pathlib import Path

import grpc
import numpy as np
import pytest

from datastore_service.client.access import Access
from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Entry, Namespace, Opening
from datastore_service.server.admission import ADMIN, DRAFTING, NEEDS
from datastore_service.server.audit import MOST_CHARACTERS, REQUEST_ID, audit_to
from datastore_service.server.entry_rights import MOST_TOLD
from datastore_service.server.identities import Right, token_digest
from datastore_service.server.identity_file import watched_table
from datastore_service.server.logs import AUDIT, JsonFormatter
from datastore_service.server.service import Service
from datastore_service.storage.data_directory import DataDirectory
from proto_gen.specstore.v1 import admin_pb2 as pb
from tests.unit.server.identity_files import put
from tests.unit.server.service import VOCAB, running
from tests.unit.server.test_identity_calls import REQUESTS, outcome
from tests.waiting import eventually

SECONDS = 60.0
DOCUMENT = Path(__file__).parents[3] / "docs" / "security.md"
TOKEN = "operator-0123456789"
ACME = {"model": "m", "tokenizer": "0" * 64, "tenant": "acme"}
TABLE = f"""
[identities.operator]
tokens = ["sha256:{token_digest(TOKEN)}"]
draft = ["acme"]
publish = ["acme"]
read = ["*"]
administer = ["acme"]
quota = ["acme"]
"""
PROOF = f"token sha256:{token_digest(TOKEN)[:8]}"


@pytest.fixture
def audit(tmp_path) -> Iterator[Path]:
    """The audit's file."""
    logger = logging.getLogger(AUDIT)
    before = logger.handlers, logger.level, logger.propagate
    audit_to(tmp_path / "audit.jsonl")
    yield tmp_path / "audit.jsonl"
    for handler in logger.handlers:
        handler.close()
    logger.handlers, logger.level, logger.propagate = before


@pytest.fixture
def service(tmp_path) -> Iterator[Service]:
    (tmp_path / "corpora").mkdir()
    np.save(tmp_path / "corpora" / "ids.npy", np.arange(9))
    with running(
        table=watched_table(put(tmp_path / "identities.toml", TABLE)),
        data=DataDirectory(tmp_path, VOCAB),
        corpora=tmp_path / "corpora",
    ) as service:
        yield service


def lines(path: Path, count: int = 1) -> list[dict]:
    """The last ones, when so many are there: a call's line may follow its answer."""
    eventually(lambda: len(path.read_text().splitlines()) >= count, "too few lines", SECONDS)
    return [json.loads(line) for line in path.read_text().splitlines()]


def call(service: Service, name: str, namespace: dict = ACME, token: str = TOKEN, **metadata: str) -> str:
    """Makes a call of the Admin service; returns its status."""
    given = Access(token=token).metadata + tuple(
        (key.replace("_", "-"), value) for key, value in metadata.items()
    )
    with grpc.insecure_channel(service.endpoint) as channel:
        return outcome(channel, f"{ADMIN}/{name}", namespace, given)[0].name


def test_an_admin_call_is_one_line_with_all_that_matters(service, audit):
    assert call(service, "Warmup", x_request_id="ticket 7") == "OK"
    (line,) = lines(audit)
    assert line.pop("time") and line.pop("peer").startswith("ipv4:127.0.0.1:")
    assert line == {
        "level": "info",
        "logger": AUDIT,
        "message": "admin call",
        "method": f"{ADMIN}/Warmup",
        "code": "OK",
        "request_id": "ticket 7",
        "identity": "operator",
        "proof": PROOF,
        **ACME,
        "reply": {"documents": 1, "tokens": 2},
    }


def test_each_call_of_the_admin_service_is_one_line(service, audit):
    names = [method.removeprefix(f"{ADMIN}/") for method in NEEDS if method.startswith(ADMIN)]
    for number, name in enumerate(names, 1):
        call(service, "Warmup")
        code = call(service, name)
        told = lines(audit, 2 * number)
        assert len(told) == 2 * number
        assert (told[-1]["method"], told[-1]["code"]) == (f"{ADMIN}/{name}", code)


def test_the_line_says_what_was_asked_and_what_became_of_it(service, audit):
    call(service, "Warmup")
    for name in ("WarmupFile", "Snapshot", "Flush", "DropNamespace"):
        assert call(service, name) == "OK"
    _, warmed, snapshot, flushed, dropped = lines(audit, 5)
    assert warmed["request"] == {"file": "ids.npy"} and warmed["reply"] == {"documents": 1, "tokens": 9}
    assert len(snapshot["request"]["name"]) == 32 and snapshot["reply"]["segments"] == 2
    assert flushed["request"] == {"all": True} and "reply" not in flushed
    assert dropped["tenant"] == "acme" and "request" not in dropped


def test_a_call_about_a_tenant_tells_of_it_alone(service, audit):
    assert call(service, "SetQuota") == "OK"
    assert call(service, "SetQuota", ACME | {"tenant": "other"}) == "PERMISSION_DENIED"
    done, denied = lines(audit, 2)
    assert (done["model"], done["tokenizer"], done["tenant"]) == ("", "", "acme")
    assert done["request"] == {"tenant": "acme", "sessions": 100} and done["reply"] == {"stored": True}
    assert denied["reason"] == "quota: identity 'operator' may not set the quota of tenant 'other'"


def test_a_refusal_is_one_line_whatever_the_call(service, audit):
    other = ACME | {"tenant": "other"}
    assert call(service, "Flush", other) == "PERMISSION_DENIED"
    assert call(service, "Flush", token="wrong-0123456789") == "UNAUTHENTICATED"
    assert call(service, "Compact") == "NOT_FOUND"
    with grpc.insecure_channel(service.endpoint) as channel:
        assert (
            outcome(channel, f"{DRAFTING}/Draft", other, Access(token=TOKEN).metadata)[0].name
            == "PERMISSION_DENIED"
        )
    told = lines(audit, 4)
    assert [line["message"] for line in told] == ["call refused"] * 4
    denied, unproven, absent, draft = told
    assert (denied["identity"], denied["tenant"], denied["request"]) == ("operator", "other", {"all": True})
    assert denied["reason"] == "administer: identity 'operator' may not administer tenant 'other'"
    assert "identity" not in unproven and "tenant" not in unproven
    assert unproven["reason"] == "authorization: a token that the service does not know"
    assert (absent["code"], absent["tenant"]) == ("NOT_FOUND", "acme")
    assert (draft["method"], draft["tenant"]) == (f"{DRAFTING}/Draft", "other")
    assert TOKEN not in audit.read_text() and "wrong-" not in audit.read_text()


def test_names_are_bounded_and_escaped(service, audit):
    rude = {"model": "m\n\x1b[2J\x7f\u202e", "tokenizer": "0" * 64, "tenant": "x" * 5000}
    assert call(service, "Flush", rude, x_request_id="i" * 3000) == "PERMISSION_DENIED"
    (line,) = lines(audit)
    text = audit.read_text()
    assert text.isascii() and text.count("\n") == 1 and not set(text[:-1]) & set(map(chr, (*range(32), 127)))
    assert line["model"] == "m\n\x1b[2J\\x7f\u202e"
    for field in ("tenant", "reason", "request_id"):
        assert MOST_CHARACTERS < len(line[field]) <= MOST_CHARACTERS + 3


def test_the_caller_is_told_the_request_s_id(service, audit):
    call(service, "Warmup")
    with grpc.insecure_channel(service.endpoint) as channel:
        stats = channel.unary_unary(
            f"/{ADMIN}/Stats", pb.StatsRequest.SerializeToString, pb.StatsReply.FromString
        )
        _, done = stats.with_call(
            REQUESTS["Stats"](ACME), timeout=SECONDS, metadata=Access(token=TOKEN).metadata
        )
        refused = stats.future(REQUESTS["Stats"](ACME), timeout=SECONDS)
        refused.exception()
        told = [dict(each.trailing_metadata())[REQUEST_ID] for each in (done, refused)]
    assert [line["request_id"] for line in lines(audit, 3)[1:]] == told and len(set(told)) == 2


def test_a_tenant_of_a_stream_is_told_of_once(service, audit):
    names = [f"t{number}" for number in range(MOST_TOLD + 5)]
    entries = [
        Entry("s", opening=Opening(), tokens=np.arange(3), tenant=tenant) for tenant in ("acme", *names)
    ]
    token = TOKEN
    datastore = GrpcDatastore(service.endpoint, Namespace("m", "0" * 64, "acme"), lambda: Access(token=token))
    try:
        assert datastore.wait_connected(SECONDS), datastore.disconnect_reason
        for _ in range(3):
            datastore.step(entries, SECONDS)
    finally:
        datastore.close()
    told = lines(audit, MOST_TOLD)
    assert [line["tenant"] for line in told] == names[:MOST_TOLD]
    assert {(line["message"], line["code"], line["identity"]) for line in told} == {
        ("tenant refused", "PERMISSION_DENIED", "operator")
    }


def test_a_file_that_was_moved_away_is_made_anew(service, audit):
    call(service, "Stats")
    first = lines(audit)
    moved = audit.rename(audit.with_name("audit.1"))
    call(service, "ListNamespaces")
    eventually(audit.exists, "not made anew", SECONDS)
    assert [line["method"] for line in lines(audit)] == [f"{ADMIN}/ListNamespaces"]
    assert lines(moved) == first


@pytest.mark.parametrize("failing", ["written", "made anew"])
def test_a_file_that_cannot_be_written_is_told_of_once_and_refuses_no_call(
    failing, service, audit, caplog, monkeypatch
):
    (handler,) = [each for each in logging.getLogger(AUDIT).handlers if isinstance(each, WatchedFileHandler)]
    with monkeypatch.context() as full:

        def fail(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        if failing == "written":
            full.setattr(handler.stream, "write", fail)
        else:
            audit.rename(audit.with_name("audit.1"))
            full.setattr(handler, "_open", fail)
        assert [call(service, "Stats") for _ in range(3)] == ["NOT_FOUND"] * 3
    assert call(service, "ListNamespaces") == "OK"
    eventually(lambda: "again" in caplog.text, "no line", SECONDS)
    told = [record.getMessage() for record in caplog.records if "audit" in record.getMessage()]
    assert told == ["the audit cannot be written: lines are lost", "the audit is written again"]


def test_without_a_file_the_lines_are_in_the_service_s_log(service, caplog):
    caplog.handler.setFormatter(JsonFormatter())
    with caplog.at_level(logging.INFO):
        call(service, "ListNamespaces")
        call(service, "Flush", token="")
        eventually(lambda: "admin call" in caplog.text and "call refused" in caplog.text, "", SECONDS)
    told = {line["message"]: line for line in map(json.loads, caplog.text.splitlines()) if "method" in line}
    assert told["admin call"]["identity"] == "operator"
    assert told["call refused"]["reason"] == "authorization: no token"


def test_a_file_that_cannot_be_made_is_an_error(tmp_path):
    with pytest.raises(OSError):
        audit_to(tmp_path / "none" / "audit.jsonl")


def test_the_documents_list_the_fields(service, audit):
    """Those of a call with all that a call may have: a trace, a reply, and the cause of a refusal."""
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    call(service, "Warmup")
    call(service, "Snapshot", traceparent=trace)
    for segment in (audit.parent / "snapshots").rglob("*.seg"):
        segment.unlink()
    call(service, "ListSnapshots")
    call(service, "Restore")
    call(service, "Flush", ACME | {"tenant": "other"})
    section = DOCUMENT.read_text().split("\n## Audit\n")[1].split("\n## ")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    told = {name for line in lines(audit, 5) for name in line}
    assert told - {"logger"} <= listed and listed - told <= {"cause"}


def test_every_right_is_one_of_a_call():
    assert {need for need in NEEDS.values() if isinstance(need, Right)} == set(Right)
