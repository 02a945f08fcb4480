"""SGLang servers that show who they are to a datastore with a table of identities, over TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from datastore_service.server.identities import token_digest
from datastore_service.tls import client_tls
from tests.support.servers.datastore import DatastoreService
from tests.support.servers.engine import ServerSpec
from tests.support.servers.forked import running
from tests.support.tiny_model import VOCABULARY
from tests.unit.certificates import Files, issue, issue_named
from tests.unit.server.identity_files import JWT_SECTION, Issuer, put, write_keys
from tests.waiting import eventually

TOKEN, OPERATOR = "engine-0123456789", "operator-0123456789"
TABLE = f"""{JWT_SECTION}
[identities.engine]
certificates = ["uri:spiffe://example/engine"]
tokens = ["sha256:{token_digest(TOKEN)}"]
claims = {{ sub = "engine" }}
draft = ["acme"]
publish = ["acme"]
"""
PROMPT = [2 + place % (VOCABULARY - 2) for place in range(40)]
WISHES = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}


class House:
    """A datastore and the words of engines that reach it."""

    def __init__(self, folder: Path) -> None:
        self.folder, authority = folder, trustme.CA()
        self.own, self.plain = (issue(folder, authority, name) for name in ("service", "plain"))
        self.engine = issue_named(folder, authority, "engine", "spiffe://example/engine")
        issuer = Issuer()
        write_keys(folder / "keys.json", issuer)
        table = put(folder / "identities.toml", TABLE)
        self.token, self.jwt = put(folder / "token", TOKEN), put(folder / "jwt", issuer.token("engine"))
        certificate = ("--tls-certificate", self.own.certificate, "--tls-key", self.own.key)
        flags = (*certificate, "--tls-client-ca", self.own.ca, "--identities", table)
        tls = client_tls(self.own.ca, self.plain.certificate, self.plain.key)
        self.service = DatastoreService(folder / "log", *flags, token=OPERATOR, tls=tls)

    def words(self, shown: Files, token: Path | None, tenant: str) -> tuple[str, ...]:
        words = ("--specstore-endpoint", self.service.endpoint, "--specstore-tenant", tenant)
        words += (
            "--specstore-tls-ca",
            str(self.own.ca),
            "--specstore-tls-certificate",
            str(shown.certificate),
        )
        words += ("--specstore-tls-key", str(shown.key))
        return words + (("--specstore-token-file", str(token)) if token else ())

    def drafts(self, tenant: str) -> int:
        """How many trees were asked for."""
        return sum(
            space.drafts for space in self.service.stats().namespaces if space.namespace.tenant == tenant
        )


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("house"))
    with house.service:
        yield house


@pytest.mark.parametrize("kind", ["certificate", "token", "jwt"])
def test_an_engine_drafts_as_what_it_shows(house, tiny_model, logs, kind):
    shown = house.engine if kind == "certificate" else house.plain
    token = {"token": house.token, "jwt": house.jwt}.get(kind)
    before, refused = house.drafts("acme"), house.service.logs().count("refused")
    spec = ServerSpec(
        f"shows-{kind}", tiny_model, "SSSD", dtype="float32", flags=house.words(shown, token, "acme")
    )
    with running(spec, logs) as server:
        eventually(lambda: house.service.stats().streams == 1, "not connected")
        assert len(server.generate(PROMPT, **WISHES)["output_ids"]) == 16
        eventually(lambda: house.drafts("acme") > before, "nothing was asked for")
    assert house.service.logs().count("refused") == refused


def test_an_engine_of_another_tenant_serves_without_the_datastore_and_says_why(house, tiny_model, logs):
    flags = house.words(house.engine, None, "globex")
    spec = ServerSpec("denied", tiny_model, "SSSD", dtype="float32", flags=flags)
    with running(spec, logs) as server:
        assert len(server.generate(PROMPT, **WISHES)["output_ids"]) == 16
        told = "draft: identity 'engine' may not draft for tenant 'globex'"
        eventually(lambda: told in server.log.read_text(), "its log does not say why")
    assert house.drafts("globex") == 0
