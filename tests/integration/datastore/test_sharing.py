"""Several real services that share their outputs over a real server."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import trustme

from datastore_service.engine.provenance import PROVENANCE
from datastore_service.protocol.types import Namespace
from datastore_service.server.sharing.keys import keys_of, tenant_prefix
from sglang_patches.launch.processes import free_port
from tests.integration.datastore.conftest import VOCAB, specstore
from tests.integration.datastore.sharing import LENGTH, NAMESPACE, outputs
from tests.support.servers.metrics import metric
from tests.support.servers.share import ShareServer
from tests.unit.certificates import issue
from tests.waiting import eventually, mostly


def test_what_one_publishes_drafts_at_the_other(members):
    first, second = members("first"), members("second")
    (text,) = outputs(1, 1)
    assert not second.proposes(text)
    first.publish(text)
    eventually(lambda: second.proposes(text))


@pytest.mark.clock
def test_most_outputs_draft_at_the_other_within_a_second(members):
    first, second = members("first"), members("second")
    texts = iter(outputs(1, 7))
    first.publish(next(texts))
    second.proposes(next(texts))

    def attempt() -> bool:
        text, began = next(texts), time.monotonic()
        first.publish(text)
        eventually(lambda: second.proposes(text))
        return time.monotonic() - began < 1.0

    mostly(attempt, "an output drafts at another service within a second")


def test_three_services_have_all_and_nothing_twice(members):
    """The third, in memory alone, comes later and begins at the start of the stream."""
    first, second = members("first"), members("second")
    of_first, of_second = outputs(1, 150), outputs(2, 150)
    for one, other in zip(of_first, of_second, strict=True):
        first.publish(one)
        second.publish(other)
    third = members("third", data=False)
    third.proposes(of_first[0])
    for member in (first, second, third):
        eventually(lambda member=member: member.tokens() == 300 * LENGTH)
        assert all(member.proposes(text) for text in (*of_first, *of_second))


def test_namespaces_do_not_cross(members):
    """Of another tenant, another model and another tokenizer, whose names are chosen to look alike."""
    names = [
        NAMESPACE,
        Namespace("m", "ab" * 32, "t"),
        Namespace("n", "ab" * 32, "t"),
        Namespace("x", "cd" * 32, "t}*:"),
    ]
    first, second = members("first"), members("second")
    texts = outputs(1, len(names))
    for name, text in zip(names, texts, strict=True):
        second.proposes(text, name)
        first.publish(text, name)
    for name, text in zip(names, texts, strict=True):
        eventually(lambda name=name, text=text: second.proposes(text, name))
        assert [second.proposes(other, name) for other in texts] == [
            bool((other == text).all()) for other in texts
        ]


def test_an_outage_is_caught_up(share, members):
    """The server and a service are away by turns; the server says so, and so do a metric and one line."""
    port = free_port()
    first, second = members("first", "--metrics-port", port), members("second")
    before, during, after = outputs(1, 3)
    first.publish(before)
    eventually(lambda: second.proposes(before))
    share.kill()
    eventually(lambda: not metric(f"http://127.0.0.1:{port}", "specstore_share_connected"))
    first.publish(during)
    assert first.proposes(during)
    eventually(lambda: metric(f"http://127.0.0.1:{port}", "specstore_share_unsent") == 1)
    second.kill()
    first.kill()
    first.start()
    eventually(lambda: "this service goes on alone" in first.service.logs())
    share.start()
    first.publish(after)
    eventually(lambda: metric(f"http://127.0.0.1:{port}", "specstore_share_connected") == 1)
    second.start()
    eventually(lambda: second.tokens() == 3 * LENGTH)
    assert all(second.proposes(text) for text in (before, during, after))
    assert metric(f"http://127.0.0.1:{port}", "specstore_share_dropped_total") == 0
    assert second.service.logs().count("this service goes on alone") <= 1 + first.service.logs().count(
        "goes on alone"
    )


def test_a_server_that_forgets_all_is_told_again(share, members):
    """It loses the stream at each kill: those who have its texts take none twice."""
    first, second = members("first"), members("second")
    texts = outputs(1, 20)
    for text in texts:
        first.publish(text)
    eventually(lambda: second.proposes(texts[-1]))
    share.client.flushall()
    share.kill()
    share.start()
    third = members("third")
    eventually(lambda: third.proposes(texts[-1]))
    for member in (first, second, third):
        assert member.tokens() == 20 * LENGTH


def message(tokens, origin: int = 7, number: int = 1, published: int = 1) -> dict[bytes, bytes]:
    provenance = np.array([(0, 0, published, origin, number)], PROVENANCE)
    return {b"text": provenance.tobytes() + np.asarray(tokens, "<u4").tobytes()}


# Those of docs/security.md.
COMMANDS = [
    "+hello",
    "+ping",
    "+client|setname",
    "+select",
    "+exists",
    "+hget",
    "+hset",
    "+sadd",
    "+smembers",
    "+watch",
    "+unwatch",
    "+multi",
    "+exec",
    "+discard",
    "+xadd",
    "+xdel",
    "+xinfo|stream",
    "+xlen",
    "+xrange",
    "+xtrim",
    "+memory|usage",
    "+set",
    "+get",
    "+del",
]

LIES = {
    "vocabulary": [message([1, VOCAB]), message([1, 2**32 - 1])],
    "malformed": [{b"text": b""}, {b"text": b"x" * 43}, message([1], origin=0), message([1], number=0), message([]), {b"forget": b"all"}],
    "unknown": [{b"words": b"1"}, {b"text": b"1", b"forget": b"2"}],
    "tokens": [message(np.zeros((1 << 20) + 1))],
    "subjects": [{b"forget": b",".join([b"user:" + b"1" * 16] * 1025)}],
}  # fmt: skip


def test_a_liar_on_the_stream_is_refused(share, members):
    port = free_port()
    service = members("service", "--metrics-port", port)
    (honest,) = outputs(1, 1)
    service.proposes(honest)
    stream = keys_of(NAMESPACE).texts
    for lies in LIES.values():
        for lie in lies:
            share.client.xadd(stream, lie)
    share.client.xadd(stream, message(honest, published=2**63))
    eventually(lambda: service.proposes(honest))
    for reason, lies in LIES.items():
        assert metric(f"http://127.0.0.1:{port}", "specstore_share_refused_total", reason=reason) == len(lies)
    assert service.tokens() == LENGTH
    assert service.service.logs().count("a message of another service is refused") == len(LIES)


def test_the_others_forget_too(share, members):
    """Also one that was away, and what it had not sent; a text that is published afterwards stays."""
    first, second, third = members("first"), members("second"), members("third")
    kept, of_first, of_third, later = outputs(1, 4)
    third.proposes(kept)
    first.publish(kept, user="bob")
    first.publish(of_first, user="alice")
    for member in (second, third):
        eventually(lambda member=member: member.proposes(kept) and member.proposes(of_first))
    share.kill()
    third.publish(of_third, user="alice")
    third.kill()
    share.start()
    done = specstore("forget", "--subject", "user:alice", "--verify", "--endpoint", first.service.endpoint)
    assert done.returncode == 0, done.stderr
    eventually(lambda: not second.proposes(of_first))
    third.start()
    eventually(lambda: not third.proposes(of_first) and not third.proposes(of_third))
    third.publish(later, user="alice")
    for member in (first, second):
        eventually(lambda member=member: member.proposes(later))
        assert member.proposes(kept) and not member.proposes(of_third) and not member.proposes(of_first)
    stream = share.client.xrange(keys_of(NAMESPACE).texts)
    assert not any(of_first.astype("<u4").tobytes() in fields.get(b"text", b"") for _, fields in stream)


def test_a_copy_of_a_data_directory_is_kept_out(share, members, tmp_path):
    """The service with the copy says so and goes on alone, until it has a name of its own. The original and the others notice nothing."""
    port = free_port()
    first, other = members("first"), members("other")
    at_copy, kept, afterwards = outputs(1, 3)
    first.publish(kept)
    eventually(lambda: other.proposes(kept))
    shutil.copytree(first.data, tmp_path / "copy" / "data")
    copy = members("copy", "--metrics-port", port)
    eventually(lambda: "remove share.json from the copy" in copy.service.logs())
    copy.publish(at_copy)
    assert copy.proposes(at_copy)
    assert metric(f"http://127.0.0.1:{port}", "specstore_share_failures_total") > 0
    first.publish(afterwards)
    eventually(lambda: other.proposes(afterwards))
    assert "share: failed" not in first.service.logs() and not other.proposes(at_copy)
    assert not copy.proposes(afterwards)
    copy.kill()
    (copy.data / "share.json").unlink()
    copy.start()
    eventually(lambda: copy.proposes(afterwards))
    assert copy.tokens() == 3 * LENGTH and other.tokens() == 2 * LENGTH


def test_a_stream_is_cut_to_the_size_of_a_live_tier(share, members):
    flags = ("--live-tokens", 8192)
    first, second = members("first", *flags), members("second", *flags)
    texts = outputs(1, 1000)
    second.proposes(texts[0])
    for text in texts:
        first.publish(text)
    eventually(lambda: second.proposes(texts[-1]))
    assert 0 < share.client.xlen(keys_of(NAMESPACE).texts) < 400


def test_a_user_of_one_tenant_reads_no_other(share, members):
    """The access control list names one tenant's keys: the service says so of the other, and shares the first."""
    theirs, others = Namespace("m", "ab" * 32, "acme"), Namespace("m", "ab" * 32, "globex")
    share.client.acl_setuser(
        "acme", enabled=True, passwords=["+secret"], keys=[f"{tenant_prefix('acme')}*"], commands=COMMANDS
    )
    server = share.url.replace("//", "//acme:secret@")
    first, second = members("first"), members("second", "--share", server)
    texts = outputs(1, 2)
    for name, text in zip((theirs, others), texts, strict=True):
        second.proposes(text, name)
        first.publish(text, name)
    eventually(lambda: second.proposes(texts[0], theirs))
    assert not second.proposes(texts[1], others)
    eventually(lambda: "share: failed" in second.service.logs())
    assert "secret" not in second.service.logs()


@pytest.fixture
def over_tls(tmp_path, request):
    """A server with a certificate, and a user of it. Its parameter: whether it asks for clients' certificates."""
    own = issue(tmp_path, trustme.CA(), "server")
    with ShareServer(tmp_path / "tls", own, asks=getattr(request, "param", False)) as server:
        server.client.acl_setuser(
            "specstore", enabled=True, passwords=["+secret"], keys=["specstore:*"], commands=COMMANDS
        )
        server.client.acl_setuser("default", enabled=True, reset_passwords=True, passwords=["+other"])
        yield server


def words_of(server: ShareServer, tmp_path: Path) -> list[object]:
    password = tmp_path / "password"
    password.write_text("secret\n")
    url, ca = server.url.replace("//", "//specstore@"), tmp_path / "server-ca.pem"
    return ["--share", url, "--share-password-file", password, "--share-tls-ca", ca]


def test_text_is_shared_over_tls_with_a_user_and_a_password_of_a_file(over_tls, members, tmp_path):
    words = words_of(over_tls, tmp_path)
    first, second = (members(name, *words) for name in ("first", "second"))
    (text,) = outputs(1, 1)
    first.publish(text)
    eventually(lambda: second.proposes(text))
    assert "secret" not in first.service.logs() and "no TLS" not in first.service.logs()


@pytest.mark.parametrize("over_tls", [True], indirect=True)
def test_a_server_that_asks_for_certificates_is_shown_one(over_tls, members, tmp_path):
    """A service with none is refused, and so is one with a stranger's, until it has another in the same place."""
    words = words_of(over_tls, tmp_path)
    own, shown = tmp_path / "server", issue(tmp_path, trustme.CA(), "shown")
    pair = ("--share-tls-certificate", shown.certificate, "--share-tls-key", shown.key)
    of_own = ("--share-tls-certificate", f"{own}.pem", "--share-tls-key", f"{own}.key")
    first, second, without = (
        members("first", *words, *of_own),
        members("second", *words, *pair),
        members("without", *words),
    )
    texts = outputs(1, 2)
    for member in (first, second, without):
        member.publish(texts[0])
    for refused in (second, without):
        eventually(lambda refused=refused: "this service goes on alone" in refused.service.logs())
        assert "share: connected" not in refused.service.logs()
    assert "ask for a certificate: share-tls-certificate" in without.service.logs()
    assert "refuse the certificate of share-tls-certificate" in second.service.logs()
    shutil.copy(f"{own}.pem", shown.certificate)
    shutil.copy(f"{own}.key", shown.key)
    eventually(lambda: "share: connected" in second.service.logs())
    first.publish(texts[1])
    eventually(lambda: second.proposes(texts[1]))
    assert not without.proposes(texts[1])


@pytest.mark.parametrize("fault", ["another authority", "the system's authorities", "another host"])
def test_a_server_whose_certificate_does_not_prove_it_gets_nothing(fault, members, tmp_path):
    authority = trustme.CA()
    own = issue(tmp_path, authority, "server")
    if fault == "another host":
        authority.issue_cert("valkey.example").private_key_and_cert_chain_pem.write_to_path(own.key)
        own.certificate.write_bytes(own.key.read_bytes())
    trusted = issue(tmp_path, trustme.CA(), "other") if fault == "another authority" else own
    words = ("--share-tls-ca", trusted.ca) if fault != "the system's authorities" else ()
    with ShareServer(tmp_path / "tls", own) as server:
        service = members("service", "--share", server.url, *words)
        service.publish(outputs(1, 1)[0])
        eventually(lambda: "this service goes on alone" in service.service.logs())
        assert "certificate verify failed" in service.service.logs()
        assert "share: connected" not in service.service.logs()


def test_a_short_outage_keeps_nobody_from_drafting(share, members):
    """A server that is there and silent: steps are answered all the same."""
    first = members("first")
    text, other = outputs(1, 2)
    first.publish(text)
    share.pause()
    first.publish(other)
    assert first.proposes(other)
    share.resume()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--share", "http://x"), "share: not valkey://"),
        (("--share", "valkey://:secret@h:1/x"), "share: database 'x' is not a number"),
        (("--share", "valkey://h:99999"), "share: "),
        (("--share", "valkey://h", "--share-tls-ca", "x"), "share-tls-ca: needs"),
        (("--share", "valkey://h", "--share-tls-key", "x"), "share-tls-key: needs a share of valkeys://"),
        (("--share", "valkeys://h", "--share-tls-ca", "x"), "share-tls-ca: x: No such file"),
        (
            ("--share", "valkeys://h", "--share-tls-certificate", "x"),
            "share-tls-certificate: needs share-tls-key",
        ),
        (("--share-password-file", "x"), "share-password-file: needs share"),
        (("--share-tls-key", "x"), "share-tls-key: needs share"),
    ],
)
def test_a_bad_address_ends_the_start(words, said):
    done = specstore("serve", *words)
    assert done.returncode == 2 and said in done.stderr and "secret" not in done.stderr
