"""The files of a server's address: what is said of them, at the start and at each connection."""

from datetime import UTC, datetime, timedelta

import pytest
import trustme
from redis.exceptions import ConnectionError as LostError

from datastore_service.endpoint import parse_endpoint
from datastore_service.server.engine_factory import engine_factory
from datastore_service.server.service import Service
from datastore_service.server.sharing.address import ShareFiles, parse_share
from sglang_patches.launch.processes import free_port
from tests.support.servers import share
from tests.support.servers.share import ShareServer
from tests.unit.certificates import issue

URL = "valkeys://h"


@pytest.fixture
def files(tmp_path):
    return ShareFiles(*issue_fields(tmp_path, "own"))


def issue_fields(folder, name: str):
    made = issue(folder, trustme.CA(), name)
    return made.ca, made.certificate, made.key


def test_the_client_has_the_files_in_its_words(files):
    words = parse_share(URL, "", files).client().connection_pool.connection_kwargs
    given = [words[name] for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")]
    assert given == [str(path) for path in files]
    assert "ssl_certfile" not in parse_share(URL, "", ShareFiles()).client().connection_pool.connection_kwargs


@pytest.mark.parametrize("option", ["ca", "certificate", "key"])
def test_files_that_are_replaced_badly_are_named_at_the_next_connection(option, files, tmp_path):
    address = parse_share(URL, "", files)
    getattr(files, option).write_text("rubbish")
    with pytest.raises(LostError, match=f"share-tls-{option}: {getattr(files, option)}: "):
        address.client()


@pytest.mark.parametrize("days", [10, 100])
def test_a_certificate_that_ends_soon_is_told_of(days, tmp_path, caplog):
    now = datetime.now(UTC)
    made = issue(tmp_path, trustme.CA(), "own", now - timedelta(days=1), now + timedelta(days=days))
    files = ShareFiles(made.ca, made.certificate, made.key)
    service = Service(
        parse_endpoint("127.0.0.1:0"),
        engine_factory(None, 100),
        share=parse_share(f"valkeys://127.0.0.1:{free_port()}", "", files),
    )
    service.start()
    service.stop()
    told = [each.message for each in caplog.records if each.name == "datastore_service.tls"]
    assert ["share-tls-certificate ends soon" in message for message in told] == [True] * (days == 10)
    made.key.write_text("rubbish")
    files.warn()
    assert f"share-tls-key: {made.key}: " in caplog.records[-1].message


def test_a_key_of_another_certificate_is_no_address(files, tmp_path):
    _, _, key = issue_fields(tmp_path, "other")
    with pytest.raises(ValueError, match=f"share-tls-key: {key}: not the key of"):
        parse_share(URL, "", files._replace(key=key))


def test_a_server_that_does_not_answer_in_time_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(share, "START_SECONDS", 0.0)
    monkeypatch.setattr(ShareServer, "_answers", lambda self: False)
    server = ShareServer(tmp_path)
    with pytest.raises(TimeoutError), server:
        pass
    assert server._child.status is not None
