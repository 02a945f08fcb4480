"""The `specstore` command, as a user runs it."""

import json
import shutil
import signal
import socket
from urllib.request import urlopen

import numpy as np
import pytest
import trustme

from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Namespace
from datastore_service.server.service import DRAIN_SECONDS, END_SECONDS
from datastore_service.tls import client_tls
from tests.integration.datastore.conftest import specstore, write_tokenizer
from tests.support.servers.datastore import DatastoreService
from tests.unit.certificates import issue
from tests.waiting import eventually


def assert_one_line(done, status: int, *parts: str) -> None:
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith("specstore: ")
    assert done.stderr.count("\n") == 1
    for part in parts:
        assert part in done.stderr


def drafted(done) -> list[dict]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_build_then_query_ids_and_text(prior, corpus, tokenizer):
    document = corpus[1][123].tolist()
    ids = " ".join(map(str, document[500:508]))
    text = " ".join(f"w{i}" for i in document[500:508])
    by_ids = drafted(specstore("query", ids, "--ids", "--prior", prior, "--tokenizer", tokenizer, "--json"))
    by_text = drafted(specstore("query", text, "--prior", prior, "--tokenizer", tokenizer, "--json"))
    assert [node["token"] for node in by_ids[:8]] == document[508:516]
    assert {node["tier"] for node in by_ids} == {"prior"}
    assert by_text == by_ids
    picture = specstore("query", text, "--prior", prior, "--tokenizer", tokenizer).stdout
    assert f"{document[508]} 'w{document[508]}'" in picture


def test_query_with_another_tokenizer(prior, tmp_path):
    done = specstore("query", "1 2", "--ids", "--prior", prior, "--tokenizer", write_tokenizer(tmp_path, "v"))
    assert_one_line(done, 1, "manifest.json", "tokenizer: built with")


def test_build_onto_a_prior_of_another_tokenizer(prior, corpus, tmp_path):
    other = write_tokenizer(tmp_path, "v")
    done = specstore("build", corpus[0], "--out", prior, "--tokenizer", other, "--field", "ids")
    assert_one_line(done, 1, "tokenizer: built with")


@pytest.fixture
def damaged(prior, tmp_path):
    copy = tmp_path / "damaged"
    shutil.copytree(prior, copy)
    return copy, max(copy.iterdir(), key=lambda path: path.stat().st_size)


def test_truncated_segment(damaged, tokenizer):
    directory, segment = damaged
    with segment.open("r+b") as file:
        file.truncate(segment.stat().st_size // 2)
    assert_one_line(
        specstore("query", "1", "--ids", "--prior", directory, "--tokenizer", tokenizer), 1, segment.name
    )
    assert_one_line(specstore("serve", "--listen", "127.0.0.1:0", "--prior", directory), 1, segment.name)


def test_flipped_byte(damaged, tokenizer):
    directory, segment = damaged
    raw = bytearray(segment.read_bytes())
    raw[len(raw) // 2] ^= 1
    segment.write_bytes(raw)
    assert_one_line(
        specstore("query", "1", "--ids", "--prior", directory, "--tokenizer", tokenizer), 1, segment.name
    )
    assert_one_line(specstore("serve", "--listen", "127.0.0.1:0", "--prior", directory), 1, segment.name)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "holds no tokens"),
        ('{"ids": [1, 2000]}\n', "2000"),
        ('{"text": 1}\n', "line 1"),
        (
            '{"ids": [1, 99999999999999999999999]}\n',
            "line 1: id 99999999999999999999999 is outside [0, 2147483648)",
        ),
    ],
)
def test_bad_corpus(content, part, tokenizer, tmp_path):
    corpus = tmp_path / "bad.jsonl"
    corpus.write_text(content)
    done = specstore("build", corpus, "--out", tmp_path / "out", "--tokenizer", tokenizer, "--field", "ids")
    assert_one_line(done, 1, "bad.jsonl", part)


def test_context_outside_the_vocabulary(prior, tokenizer):
    done = specstore("query", "1 5000", "--ids", "--prior", prior, "--tokenizer", tokenizer)
    assert_one_line(done, 2, "5000")
    done = specstore("query", "1 x", "--ids", "--prior", prior, "--tokenizer", tokenizer)
    assert_one_line(done, 2, "context: 'x' is not a token id")


def test_bad_endpoints(tmp_path):
    assert_one_line(specstore("serve", "--listen", "nowhere"), 2, "listen: 'nowhere' is not HOST:PORT")
    assert_one_line(specstore("serve", "--listen", "0.0.0.0:0"), 2, "--allow-remote")
    assert_one_line(
        specstore("serve", "--listen", "0.0.0.0:0", "--allow-remote"),
        2,
        "admin token: it or --identities is required",
    )
    assert_one_line(
        specstore("stats", "--endpoint", "127.0.0.1:1"), 1, "no datastore at 127.0.0.1:1 (connection refused)"
    )
    (tmp_path / "file").touch()
    assert_one_line(specstore("serve", "--data", tmp_path / "file"), 2, "data: ")
    for given in ("acme", "acme=", "=x"):
        assert_one_line(specstore("serve", "--tenant-prior", given), 2, f"tenant-prior: '{given}' is not")
    twice = ("--tenant-prior", "acme=x", "--tenant-prior", "acme=y")
    assert_one_line(specstore("serve", *twice), 2, "tenant-prior: 'acme' has two")
    assert_one_line(specstore("serve", *twice[:2]), 1, "x")


def test_what_the_system_refuses_is_told_in_words(corpus, tokenizer, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = specstore("serve", "--listen", address)
    assert_one_line(done, 1, f"specstore: cannot listen on {address}: Address already in use\n")
    (tmp_path / "file").write_text("")
    done = specstore("serve", "--listen", f"unix:{tmp_path}/file")
    assert_one_line(done, 1, "there is a file that is no socket\n")
    done = specstore("serve", "--listen", f"unix:{tmp_path}/none/socket")
    assert_one_line(done, 1, f"{tmp_path}/none is no directory\n")
    out = tmp_path / "file"
    done = specstore("build", corpus[0], "--out", out, "--tokenizer", tokenizer, "--field", "ids")
    assert_one_line(done, 1, f"specstore: {out}: File exists\n")


def test_a_running_service_from_the_command_line(prior, corpus, tokenizer, tmp_path):
    document = corpus[1][7].tolist()
    name = ("--model", "m", "--tokenizer", tokenizer)
    more = tmp_path / "more.npy"
    np.save(more, np.arange(100, 200))
    token = tmp_path / "token"
    token.write_text("secret\n")
    flags = ("--prior", prior, "--admin-token-file", token, "--namespaces", 1)
    with DatastoreService(tmp_path / "log", *flags) as service:
        at = ("--endpoint", service.endpoint)
        eventually(lambda: specstore("health", *at).stdout == "SERVING\n")
        context = " ".join(map(str, document[:8]))
        assert_one_line(specstore("query", context, "--ids", *name, *at), 1, "there is no model 'm'")
        warmed = specstore("warmup", more, *name, *at, SPECSTORE_ADMIN_TOKEN="secret")
        assert warmed.stdout == "added 1 documents, 100 tokens\n"
        nodes = drafted(specstore("query", context, "--ids", *name, *at, "--json"))
        assert [node["token"] for node in nodes[:4]] == document[8:12]
        assert_one_line(
            specstore("stats", *at), 1, "the service asks who calls (no admin token): give --token-file"
        )
        (tmp_path / "other").write_text("other")
        assert_one_line(
            specstore("stats", *at, "--token-file", tmp_path / "other"),
            1,
            f"does not take the token of --token-file {tmp_path}",
        )
        assert_one_line(
            specstore("stats", *at, SPECSTORE_ADMIN_TOKEN="x"),
            1,
            "does not take the token of SPECSTORE_ADMIN_TOKEN",
        )
        nodes = drafted(specstore("query", "120 121 122 123", "--ids", *name, *at, "--json"))
        assert {"token": 124, "tier": "live"}.items() <= nodes[0].items()
        stats = json.loads(specstore("stats", "--json", *at, "--token-file", token).stdout)
        (namespace,) = stats["namespaces"]
        tiers = {tier["tier"]: tier for tier in namespace["tiers"]}
        assert (namespace["prior"], namespace["sessions"]) == (True, 0)
        assert (tiers["TIER_PRIOR"]["tokens"], tiers["TIER_LIVE"]["tokens"]) == ("300000", "100")
        assert "300,000" in specstore("stats", *at, "--token-file", token).stdout
        assert_one_line(specstore("flush", *name, *at, "--tier", "hot"), 2, "tier: 'hot'")
        assert_one_line(specstore("flush", *name, *at), 2, "one of --tier, --session, --workspace and --all")
        assert specstore("epoch", *name, *at, "--token-file", token).stdout == "epoch 0\n"
        said = specstore("epoch", *name, *at, "--keep", 1, "--token-file", token).stdout
        assert said == "epoch 0: removed 0 documents, 0 tokens\n"
        assert specstore("epoch", *name, *at, "--keep", 0, "--token-file", token).returncode == 2
        assert specstore("flush", *name, *at, "--all", "--token-file", token).returncode == 0
        assert "124" not in specstore("query", "120 121 122 123", "--ids", *name, *at, "--json").stdout
        secret = ("--token-file", token)
        listed = json.loads(specstore("namespaces", "--json", *at, *secret).stdout)
        assert [n["model"] for n in listed["namespaces"]] == ["m"]
        assert json.loads(specstore("sessions", *name, "--json", *at, *secret).stdout) == {"sessions": []}
        other = specstore("warmup", more, "--model", "other", "--tokenizer", tokenizer, *at, *secret)
        assert_one_line(other, 1, "the service already holds 1, its limit")
        assert specstore("compact", *name, *at, *secret).stdout == "live tier: 0 tokens in 0 segments\n"
        assert specstore("drop-namespace", *name, *at, *secret).stdout == "dropped\n"
        assert_one_line(specstore("drop-namespace", *name, *at, *secret), 1, "there is no model 'm'")
        service.signal(signal.SIGTERM)
        assert service.wait(END_SECONDS) == 0
    events = events_of(service)
    assert (events[0], events[-1]) == ("serving", "stopped") and "draining" in events


def events_of(service) -> list[str]:
    return [json.loads(line)["message"] for line in service.logs().splitlines()]


@pytest.mark.clock
def test_a_service_ends_its_calls_in_time(tmp_path):
    with DatastoreService(tmp_path / "log") as service:
        datastore = GrpcDatastore(service.endpoint, Namespace("m", "a" * 64))
        assert datastore.wait_connected(60)
        service.signal(signal.SIGTERM)
        assert service.wait(DRAIN_SECONDS) == 0
        datastore.close()
    assert events_of(service)[-2:] == ["draining", "stopped"]


@pytest.mark.parametrize(("fusion", "parents"), [("weighted", {-1}), ("priority", {-1, 0})])
def test_fusion_of_a_service(fusion, parents, tokenizer, tmp_path):
    """Two texts part after the context: a tree has both, a chain follows one."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"ids": [1, 2, 3, 4, 5]}\n{"ids": [1, 2, 3, 6, 7]}\n')
    with DatastoreService(tmp_path / "log", "--fusion", fusion) as service:
        at = ("--endpoint", service.endpoint, "--model", "m", "--tokenizer", tokenizer)
        assert specstore("warmup", texts, "--field", "ids", *at).returncode == 0
        nodes = drafted(specstore("query", "1 2 3", "--ids", "--json", "--nodes", 2, *at))
        assert {node["parent"] for node in nodes} == parents
        assert {node["token"] for node in nodes} in ({4, 6}, {4, 5}, {6, 7})


def test_a_service_with_tls_a_data_directory_and_a_status_page(corpus, tokenizer, tmp_path):
    files = issue(tmp_path / "tls", trustme.CA(), "service")
    corpora = tmp_path / "data" / "corpora"
    corpora.mkdir(parents=True)
    np.save(corpora / "ids.npy", corpus[1][:2])
    flags = ("--tls-certificate", files.certificate, "--tls-key", files.key, "--tls-client-ca", files.ca)
    tls = client_tls(files.ca, files.certificate, files.key)
    with DatastoreService(
        tmp_path / "log", *flags, "--data", tmp_path / "data", "--metrics-port", 0, tls=tls
    ) as service:
        at = ("--endpoint", service.endpoint, "--model", "m", "--tokenizer", tokenizer)
        mine = ("--tls-ca", files.ca, "--tls-certificate", files.certificate, "--tls-key", files.key)
        warmed = specstore("warmup", "--server-file", "ids.npy", *at, *mine)
        assert (warmed.stdout, warmed.stderr) == ("added 2 documents, 2000 tokens\n", "")
        context = " ".join(map(str, corpus[1][1][:8]))
        (node, *_) = drafted(specstore("query", context, "--ids", "--json", *at, *mine))
        assert (node["token"], node["tier"]) == (corpus[1][1][8], "live")
        refused = specstore("query", context, "--ids", *at, "--tls-ca", files.ca)
        assert_one_line(refused, 1, "or a client's certificate")
        events = [json.loads(line) for line in service.logs().splitlines() if line.startswith("{")]
        url = next(event["url"] for event in events if "url" in event)
        with urlopen(url) as page, urlopen(url + "metrics") as metrics:
            assert "<td>2,000</td>" in page.read().decode()
            assert 'specstore_tokens{model="m",tenant="",tier="live"} 2000.0' in metrics.read().decode()
    refused = specstore("serve", "--listen", "127.0.0.1:0", "--tls-certificate", files.certificate)
    assert_one_line(refused, 2, "tls-certificate: needs tls-key")
