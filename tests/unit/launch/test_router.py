"""What the router is told of the instances: those that appear, those that go."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sglang_patches.launch import router
from sglang_patches.launch.router import Group, Membership, read_groups


class Workers(BaseHTTPRequestHandler):
    """The calls of SGLang's router that list, add and remove workers, with the fields that 0.3.2 has."""

    listed: dict[str, dict]

    def do_GET(self):  # noqa: N802
        self._answer(200, {"workers": list(self.listed.values()), "total": len(self.listed)})

    def do_POST(self):  # noqa: N802
        worker = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.listed[worker["url"]] = worker | {"id": str(len(self.listed))}
        self._answer(202, {"status": "accepted"})

    def do_DELETE(self):  # noqa: N802
        gone = self.path.rsplit("/", 1)[-1]
        for url in [url for url, worker in self.listed.items() if worker["id"] == gone]:
            del self.listed[url]
        self._answer(202, {"status": "accepted"})

    def _answer(self, status: int, body: dict) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def listed() -> Iterator[tuple[str, dict]]:
    handler = type("Handler", (Workers,), {"listed": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler.listed
    server.shutdown()
    server.server_close()


@pytest.fixture
def addresses(monkeypatch) -> dict[str, list[str]]:
    """What names resolve to; who is there is healthy, but for 10.0.0.9."""
    found: dict[str, list[str]] = {"prefill": ["10.0.0.1"], "decode": ["10.0.0.2", "10.0.0.3"]}
    monkeypatch.setattr(Group, "urls", lambda group: {f"http://{a}:{group.port}" for a in found[group.host]})
    monkeypatch.setattr(router, "_healthy", lambda url: "10.0.0.9" not in url)
    return found


GROUPS = read_groups({"PREFILL": "prefill:30000:9000", "DECODE": "decode:30000"})


def test_instances_are_added_with_their_roles_and_taken_out_when_they_are_gone(listed, addresses):
    url, workers = listed
    membership = Membership(url, GROUPS)
    membership.update()
    assert {w["url"]: (w["worker_type"], w.get("bootstrap_port")) for w in workers.values()} == {
        "http://10.0.0.1:30000": ("prefill", 9000),
        "http://10.0.0.2:30000": ("decode", None),
        "http://10.0.0.3:30000": ("decode", None),
    }
    addresses["decode"] = ["10.0.0.3", "10.0.0.4", "10.0.0.9"]
    membership.update()
    assert sorted(workers) == [f"http://10.0.0.{i}:30000" for i in (1, 3, 4)]


def test_a_router_that_has_not_listed_an_instance_yet_is_not_told_again(listed, addresses):
    url, workers = listed
    membership = Membership(url, GROUPS)
    membership.update()
    workers.clear()
    membership.update()
    assert workers == {}


def test_a_group_is_one_or_several_places():
    groups = read_groups({"PREFILL": "a:1,b:2:9", "DECODE": "c:3,d:4"})
    assert [(g.role, g.host, g.port, g.bootstrap_port) for g in groups] == [
        ("prefill", "a", 1, 8998),
        ("prefill", "b", 2, 9),
        ("decode", "c", 3, None),
        ("decode", "d", 4, None),
    ]


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"DECODE": "d:1"}, "PREFILL"),
        ({"PREFILL": "p:1", "DECODE": "d:0"}, "DECODE"),
        ({"PREFILL": "p:1:x", "DECODE": "d:1"}, "PREFILL"),
        ({"PREFILL": "p", "DECODE": "d:1"}, "PREFILL"),
        ({"PREFILL": "p:1:2:3", "DECODE": "d:1"}, "PREFILL"),
        ({"PREFILL": "p:1", "DECODE": "d:1,"}, "DECODE"),
        ({"PREFILL": "p:1", "DECODE": "d:1:8998"}, "DECODE"),
    ],
)
def test_a_bad_variable_is_refused_by_name(variables, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        read_groups(variables)
