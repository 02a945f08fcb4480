"""The command with a table of identities: what an operator writes, shows and reads, with real processes over TLS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from datastore_service.server.identities import token_digest
from datastore_service.tls import client_tls
from tests.integration.datastore.conftest import specstore
from tests.support.servers.datastore import DatastoreService
from tests.unit.certificates import issue, issue_named
from tests.unit.server.identity_files import JWT_SECTION, Issuer, put, write_keys
from tests.waiting import eventually

TOKEN = "reader-0123456789"
TABLE = f"""{JWT_SECTION}
[identities.feeder]
certificates = ["uri:spiffe://example/feeder"]
publish = ["acme"]

[identities.reader]
tokens = ["sha256:{token_digest(TOKEN)}"]
draft = ["acme"]
read = ["acme"]

[identities.operator]
claims = {{ sub = "operator" }}
read = ["*"]
administer = ["*"]
"""
NAMESPACE = ("--model", "m", "--tokenizer", "0" * 64, "--tenant", "acme")


class House:
    """A service, and the words with which each identity calls it."""

    def __init__(self, folder: Path, service: DatastoreService, words: dict[str, tuple]) -> None:
        self.folder, self.service, self.words = folder, service, words

    def call(self, who: str, *words: object, **environment: str):
        at = ("--endpoint", self.service.endpoint)
        return specstore(*words, *at, *self.words[who], **environment)

    def audit(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "audit").read_text().splitlines()]


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Iterator[House]:
    folder, authority, issuer = tmp_path_factory.mktemp("house"), trustme.CA(), Issuer()
    own, plain = (issue(folder, authority, name) for name in ("service", "plain"))
    feeder = issue_named(folder, authority, "feeder", "spiffe://example/feeder")
    write_keys(folder / "keys.json", issuer)
    table = put(folder / "identities.toml", TABLE)
    files = {"token": TOKEN, "jwt": issuer.token("operator"), "wrong": "wrong-0123456789"}
    paths = {name: put(folder / name, text) for name, text in files.items()}

    def tls(files) -> tuple:
        return "--tls-ca", files.ca, "--tls-certificate", files.certificate, "--tls-key", files.key

    words = {
        "feeder": tls(feeder),
        "reader": (*tls(plain), "--token-file", paths["token"]),
        "operator": (*tls(plain), "--token-file", paths["jwt"]),
        "wrong": (*tls(plain), "--token-file", paths["wrong"]),
        "nobody": tls(plain),
    }
    flags = ("--tls-certificate", own.certificate, "--tls-key", own.key, "--tls-client-ca", own.ca)
    asked = client_tls(own.ca, plain.certificate, plain.key)
    rules = ("--identities", table, "--audit-log", folder / "audit", "--log-level", "info")
    with DatastoreService(folder / "log", *flags, *rules, tls=asked) as service:
        yield House(folder, service, words)


def test_each_kind_of_identity_is_shown_by_the_command(house):
    put(house.folder / "text.jsonl", json.dumps({"ids": list(range(50))}))
    fed = house.call("feeder", "warmup", house.folder / "text.jsonl", "--field", "ids", *NAMESPACE)
    assert fed.stdout == "added 1 documents, 50 tokens\n", fed.stderr
    asked = house.call("reader", "query", "3 4 5", "--ids", *NAMESPACE, "--json")
    assert json.loads(asked.stdout)[0]["token"] == 6, asked.stderr
    flushed = house.call("operator", "flush", "--all", *NAMESPACE)
    assert flushed.stdout == "flushed all\n", flushed.stderr
    assert house.call("nobody", "health").stdout == "SERVING\n"
    by = [
        (line["method"].rpartition("/")[2], line["identity"], line["tenant"]) for line in house.audit()[-2:]
    ]
    assert by == [("Warmup", "feeder", "acme"), ("Flush", "operator", "acme")]


def test_the_token_s_variables_are_those_of_the_plugin(house):
    shown = {"SPECSTORE_TOKEN_FILE": str(house.folder / "token")}
    assert house.call("nobody", "stats", **shown).returncode == 0
    assert house.call("nobody", "stats", SPECSTORE_ADMIN_TOKEN=TOKEN).returncode == 0


@pytest.mark.parametrize(
    ("who", "words", "told"),
    [
        ("reader", ("flush", "--all", *NAMESPACE), "administer: identity 'reader' may not administer tenant 'acme'"),
        ("feeder", ("stats",), "read: identity 'feeder' may not read the statistics of any tenant"),
        ("feeder", ("query", "1", "--ids", *NAMESPACE), "draft: identity 'feeder' may not draft for tenant 'acme'"),
        ("wrong", ("stats",), "the service does not take the token of --token-file {wrong}: a token that the service does not know"),
        ("nobody", ("stats",), "the service asks who calls (no token, and no name of the certificate is an identity's): give --token-file or SPECSTORE_ADMIN_TOKEN"),
    ],
)  # fmt: skip
def test_a_refusal_is_one_line_here_and_in_the_audit(house, who, words, told):
    before = len(house.audit())
    refused = house.call(who, *words)
    assert refused.returncode == 1
    assert refused.stderr == f"specstore: {told.format(wrong=house.folder / 'wrong')}\n"
    (line,) = house.audit()[before:]
    assert (
        line["message"] == "call refused" and line["reason"].removeprefix("authorization: ") in refused.stderr
    )


def test_the_service_s_log_has_no_line_of_the_audit(house):
    house.call("nobody", "stats")
    house.call("operator", "stats")
    logged = [json.loads(line) for line in house.service.logs().splitlines() if line.startswith("{")]
    assert "serving" in [line["message"] for line in logged]
    assert not [line for line in logged if "method" in line]


def test_a_wrong_new_table_is_told_of_and_changes_nothing(house):
    put(house.folder / "identities.toml", TABLE.replace("draft", "darft"))
    told = '"option": "identities", "reason": "identities: '
    eventually(lambda: told in house.service.logs(), "not told of", 60.0)
    assert "identities.reader.darft: unknown, did you mean draft?" in house.service.logs()
    assert house.call("reader", "stats").returncode == 0
    put(house.folder / "identities.toml", TABLE)
    eventually(lambda: "changed files are in force" in house.service.logs(), "not in force", 60.0)


def test_a_table_that_is_wrong_at_the_start_ends_it_in_one_line(tmp_path):
    table = put(tmp_path / "identities.toml", "[identities.one]")
    done = specstore("serve", "--listen", "127.0.0.1:0", "--identities", table)
    assert done.returncode == 2
    assert done.stderr.startswith(f"specstore: identities: {table}: identities.one: proven by nothing")
    assert done.stderr.count("\n") == 1


def test_an_audit_that_cannot_be_written_ends_the_start(tmp_path):
    done = specstore("serve", "--listen", "127.0.0.1:0", "--audit-log", tmp_path / "none" / "audit")
    assert done.returncode == 1
    assert done.stderr == f"specstore: {tmp_path / 'none' / 'audit'}: No such file or directory\n"
