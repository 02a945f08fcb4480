"""The status page over HTTP: what it shows, what it escapes, what else the port answers."""

import threading
from collections.abc import Callable
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from xml.etree import ElementTree

import numpy as np
import pytest

from datastore_service.endpoint import parse_endpoint
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening
from datastore_service.server import service as module
from datastore_service.server.engine_factory import engine_factory
from datastore_service.server.history import SAMPLE_SECONDS, SAMPLES, History
from datastore_service.server.service import Service
from datastore_service.server.web import WebServer
from tests.unit.server.service import VOCAB, running, serving

HOSTILE = '<script>alert("1")</script>'
TEXT = np.array([1, 2, 3, 4] * 10, np.int32)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def service():
    with running() as service:
        yield service


def decode(service: Service, tenant: str, steps: int) -> None:
    """A session that repeats itself, a draft a step."""
    hosted = service.namespaces.open(Namespace("model", "t" * 64, tenant))
    hosted.engine.step([Entry("s", tokens=TEXT, opening=Opening(), budget=Budget(4))])
    for at in range(40, 40 + steps):
        tokens = np.array([at % 4 + 1], np.int32)
        hosted.engine.step([Entry("s", at, tokens, budget=Budget(4))])


def read(service: Service) -> ElementTree.Element:
    """The page; it is well-formed XML as well as HTML."""
    with serving(service) as url, urlopen(url) as reply:
        assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
        return ElementTree.fromstring(reply.read().decode())


def text(element: ElementTree.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def test_an_empty_service_says_what_makes_a_namespace(service):
    page = read(service)
    assert "No namespace yet." in text(page)
    assert page.findall(".//table") == []


def test_shows_every_namespace_with_its_tiers(service):
    decode(service, "", 3)
    decode(service, "acme", 0)
    page = read(service)
    assert [text(heading) for heading in page.iter("h2")] == ["model", "model, tenant acme"]
    table = page.find(".//table")
    rows = {text(row[0]): [text(cell) for cell in row[1:]] for row in table.find("tbody")}
    assert list(rows) == ["prior", "live", "session", "rejected"]
    tokens, size, segments, hits, drafted, came_true, share = rows["session"]
    assert (tokens, segments, hits, drafted, came_true, share) == ("43", "0", "100%", "16", "3", "18.8%")
    assert size.endswith("kB")
    assert rows["live"] == ["0", "0 B", "0", "0%", "0", "0", "–"]


def test_names_are_escaped(service):
    service.namespaces.open(Namespace(HOSTILE, "t", HOSTILE))
    page = read(service)
    assert page.findall(".//script") == []
    assert text(page.find(".//h2")) == f"{HOSTILE}, tenant {HOSTILE}"


def test_charts_have_points_after_samples_and_say_what_they_show(service):
    clock = Clock()
    service.page._history = history = History(service.namespaces, clock)
    for number in range(3):
        decode(service, "", number)
        history.tick()
        clock.now += SAMPLE_SECONDS
    page = read(service)
    pictures = page.findall(".//svg")
    assert len(pictures) == 4
    for picture in pictures:
        (title,) = [
            each for each in picture.iter("title") if each.get("id") == picture.get("aria-labelledby")
        ]
        assert picture.get("role") == "img" and text(title)
    hits, came_true, size, sessions = [
        {path.get("class"): path.get("d") for path in picture.iter("path")} for picture in pictures
    ]
    assert hits["session"].count("L") == came_true["session"].count("L") == 1, "two shares of three samples"
    assert size["session"].count("L") == sessions["sessions"].count("L") == 2


def test_history_is_bounded_and_sampled_evenly(service):
    clock = Clock()
    history = History(service.namespaces, clock)
    for _ in range(SAMPLES + 10):
        history.tick()
        clock.now += SAMPLE_SECONDS / 2
        history.tick()
        clock.now += SAMPLE_SECONDS / 2
    assert len(history.samples) == SAMPLES
    steps = {
        after.at - before.at for before, after in zip(history.samples, history.samples[1:], strict=False)
    }
    assert steps == {SAMPLE_SECONDS}


def test_a_dropped_namespace_leaves_the_page(service):
    hosted = service.namespaces.open(Namespace("gone", "t"))
    service.history.tick()
    service.namespaces.drop(hosted)
    assert "gone" not in text(read(service))


def test_only_the_page_the_metrics_and_the_probes_are_there(service):
    with serving(service) as url:
        for path, method, status in (
            ("x", "GET", 404),
            ("../etc/passwd", "GET", 404),
            ("", "POST", 405),
            ("readyz", "POST", 405),
        ):
            with pytest.raises(HTTPError) as error:
                urlopen(Request(url + path, method=method))
            assert error.value.code == status
            if status == 404:
                assert error.value.read() == b"there are /, /metrics, /healthz, /readyz\n"
        for _ in range(2):
            with urlopen(url) as reply:
                assert reply.headers.get_all("Content-Length") == [str(len(reply.read()))]
        with urlopen(url + "metrics") as reply:
            assert reply.headers["Content-Type"].startswith("text/plain")


def test_a_taken_port_names_the_option(service):
    with serving(service) as url:
        port = int(url.rstrip("/").rpartition(":")[2])
        with pytest.raises(OSError, match=f"^metrics-port: {port}: Address already in use$"):
            WebServer(lambda *_: [], port)


def test_another_address_is_listened_on_and_a_foreign_one_names_the_option(service):
    server = WebServer(service.web_application(), 0, "127.0.0.2")
    assert server.url.startswith("http://127.0.0.2:")
    with urlopen(server.url + "metrics") as reply:
        assert b"specstore_streams 0.0" in reply.read()
    server.close()
    with pytest.raises(OSError, match=r"^metrics-host: 192\.0\.2\.1:0: Cannot assign requested address$"):
        WebServer(lambda *_: [], 0, "192.0.2.1")


def probed(url: str, name: str) -> tuple[int, str]:
    try:
        with urlopen(url + name) as reply:
            return reply.status, reply.read().decode().strip()
    except HTTPError as error:
        return error.code, error.read().decode().strip()


@pytest.fixture
def service_to_start():
    service = Service(parse_endpoint("127.0.0.1:0"), engine_factory(None, VOCAB))
    yield service
    service.stop()


def test_a_service_is_ready_from_its_start_to_its_end(service_to_start):
    service, seen = service_to_start, []
    with serving(service) as url:

        def see(act: Callable[[], object]) -> None:
            act()
            seen.append((probed(url, "healthz"), probed(url, "readyz")))

        see(lambda: None)
        see(service.start)
        close, service.namespaces.close = service.namespaces.close, lambda: see(close)
        see(service.stop)
    stopping = (200, "ok"), (503, "the service is shutting down")
    assert seen == [
        ((200, "ok"), (503, "the service has not started")),
        ((200, "ok"), (200, "ok")),
        stopping,  # its streams have ended, its texts are being closed
        stopping,
    ]


def test_a_server_that_answers_no_call_is_neither_alive_nor_ready(service, monkeypatch):
    """The kubelet then starts it again."""
    monkeypatch.setattr(module, "ALIVE_SECONDS", 0.1)
    released = threading.Event()
    with serving(service) as url:
        service._server._loop.call_soon_threadsafe(released.wait)
        try:
            assert [probed(url, name)[0] for name in ("healthz", "readyz")] == [503, 503]
        finally:
            released.set()
        monkeypatch.undo()
        assert probed(url, "readyz") == (200, "ok")
