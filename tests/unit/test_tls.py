"""What is said of TLS files that do not fit, before anything uses them."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from datastore_service.tls import client_tls, server_tls
from tests.unit.certificates import issue


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return issue(tmp_path_factory.mktemp("tls"), trustme.CA(), "one")


@pytest.fixture
def rubbish(tmp_path):
    path = tmp_path / "rubbish"
    path.write_text("not a certificate\n")
    return path


def test_no_files_are_no_tls():
    assert server_tls(None, None) is None
    assert client_tls("", "", "") is None


def test_reads_each_end(files):
    server = server_tls(files.certificate, files.key, files.ca)
    assert (server.certificate, server.key) == (files.certificate.read_bytes(), files.key.read_bytes())
    assert server.ca == files.ca.read_bytes()
    assert server_tls(files.certificate, files.key).ca is None
    client = client_tls(str(files.ca))
    assert (client.ca, client.certificate, client.key) == (files.ca.read_bytes(), None, None)


def test_a_part_alone_names_what_it_needs(files):
    with pytest.raises(ValueError, match="^tls-certificate: needs tls-key$"):
        server_tls(files.certificate, None)
    with pytest.raises(ValueError, match="^tls-key: needs tls-certificate$"):
        server_tls(None, files.key)
    with pytest.raises(ValueError, match="^tls-client-ca: needs tls-certificate and tls-key$"):
        server_tls(None, None, files.ca)
    with pytest.raises(ValueError, match="^tls-certificate: needs tls-ca$"):
        client_tls(None, files.certificate, files.key)
    with pytest.raises(ValueError, match="^tls-key: needs tls-certificate$"):
        client_tls(files.ca, None, files.key)


def test_unreadable_files_are_named(files, tmp_path):
    gone = tmp_path / "gone"
    with pytest.raises(ValueError, match=f"^tls-certificate: {gone}: No such file or directory$"):
        server_tls(gone, files.key)
    with pytest.raises(ValueError, match=f"^tls-key: {gone}: No such file or directory$"):
        server_tls(files.certificate, gone)
    with pytest.raises(ValueError, match=f"^tls-ca: {tmp_path}: Is a directory$"):
        client_tls(tmp_path)


def test_a_file_that_goes_while_it_is_read_is_refused(files, tmp_path, monkeypatch):
    key = tmp_path / "key"
    key.write_bytes(files.key.read_bytes())
    read = Path.read_bytes

    def read_and_remove(path: Path) -> bytes:
        data = read(path)
        if path == key:
            path.unlink()
        return data

    monkeypatch.setattr(Path, "read_bytes", read_and_remove)
    with pytest.raises(ValueError, match=f"^tls-key: {key}: No such file or directory$"):
        server_tls(files.certificate, key)


def test_files_of_another_kind_are_named(files, rubbish):
    with pytest.raises(ValueError, match=f"^tls-certificate: {rubbish}: no PEM certificate in it$"):
        server_tls(rubbish, files.key)
    with pytest.raises(ValueError, match=f"^tls-client-ca: {files.key}: no PEM certificate in it$"):
        server_tls(files.certificate, files.key, files.key)
    with pytest.raises(ValueError, match=f"^tls-key: {rubbish}: not a PEM private key"):
        server_tls(files.certificate, rubbish)


def test_a_key_of_another_certificate_is_named(files, tmp_path):
    other = issue(tmp_path, trustme.CA(), "other")
    with pytest.raises(ValueError, match=f"^tls-key: {other.key}: not the key of {files.certificate}$"):
        server_tls(files.certificate, other.key)


def test_a_key_with_a_passphrase_is_refused_without_asking_for_it(files, tmp_path):
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ValueError, match=f"^tls-key: {locked}: not a PEM private key without a passphrase$"):
        server_tls(files.certificate, locked)


NOW = datetime.now(UTC)
DAY = timedelta(days=1)


@pytest.fixture(
    params=[(NOW - 2 * DAY, NOW - DAY, "ended"), (NOW + DAY, NOW + 2 * DAY, "begins")], ids=["past", "future"]
)
def out_of_date(request, tmp_path):
    begins, ends, word = request.param
    day = ends if word == "ended" else begins
    files = issue(tmp_path, trustme.CA(), "dated", begins, ends)
    return files, f"a certificate in it {word} on {day:%Y-%m-%d %H:%M} UTC"


def test_a_certificate_out_of_date_is_refused_on_both_sides(out_of_date):
    files, fault = out_of_date
    for make in (
        lambda: server_tls(files.certificate, files.key),
        lambda: client_tls(files.ca, files.certificate, files.key),
    ):
        with pytest.raises(ValueError) as refused:
            make()
        assert str(refused.value) == f"tls-certificate: {files.certificate}: {fault}"


def test_one_of_a_chain_out_of_date_is_refused(out_of_date, files):
    dated, fault = out_of_date
    chain = dated.ca.with_name("chain.pem")
    chain.write_bytes(files.certificate.read_bytes() + dated.certificate.read_bytes())
    with pytest.raises(ValueError, match=f"^tls-certificate: {chain}: {fault}$"):
        server_tls(chain, files.key)


def test_an_authority_out_of_date_is_refused_unless_its_successor_is_there(out_of_date, files):
    dated, fault = out_of_date
    with pytest.raises(ValueError, match=f"^tls-ca: {dated.certificate}: {fault}$"):
        client_tls(dated.certificate)
    with pytest.raises(ValueError, match=f"^tls-client-ca: {dated.certificate}: {fault}$"):
        server_tls(files.certificate, files.key, dated.certificate)
    both = dated.ca.with_name("both.pem")
    both.write_bytes(dated.certificate.read_bytes() + files.ca.read_bytes())
    assert client_tls(both).ca == both.read_bytes()


@pytest.mark.parametrize(("days", "soon"), [(13, True), (15, False)])
def test_the_end_of_the_own_certificate_is_foreseen(tmp_path, days, soon):
    files = issue(tmp_path, trustme.CA(), "short", NOW - DAY, NOW + days * DAY)
    assert server_tls(files.certificate, files.key).ends_soon(NOW) is soon
    assert server_tls(files.certificate, files.key).ends_soon(NOW + 2 * DAY)
    assert not client_tls(files.ca).ends_soon(NOW)
