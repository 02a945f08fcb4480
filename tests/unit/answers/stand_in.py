"""A stand-in for SGLang's HTTP endpoint: a real HTTP server on the loopback whose answers a test writes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, object]
BROKEN: Reply = (0, None)  # the connection is closed without an answer


def answered(text: str, tokens: object = None, reason: str = "stop") -> Reply:
    """As SGLang 0.5.23 answers. tokens: left out if None."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": reason,
    }
    return 200, {"choices": [choice if tokens is None else choice | {"response_token_ids": tokens}]}


class StandIn:
    """reply: makes the answer of each chat request. requests: their bodies, in the order of arrival. headers: of the latest.
    most: how many were under way at once. models: the status of /v1/models."""

    def __init__(self, reply: Callable[[dict], Reply]) -> None:
        self.reply, self.models = reply, 200
        self.requests: list[dict] = []
        self.headers: dict[str, str] = {}
        self.most = self._now = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.requests]

    def answer(self, body: dict) -> Reply:
        with self._lock:
            self.requests.append(body)
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            return self.reply(body)
        finally:
            with self._lock:
                self._now -= 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # noqa: N802
                stand_in.headers = dict(self.headers)
                self.send(stand_in.models, {"data": []})

            def do_POST(self) -> None:  # noqa: N802
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stand_in.headers = dict(self.headers) | {"path": self.path}
                status, reply = stand_in.answer(body)
                if status:
                    self.send(status, reply)

            def send(self, status: int, reply: object) -> None:
                content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                with suppress(ConnectionError):  # an interrupted client has gone
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """Says nothing."""

        return Handler


@contextmanager
def standing_in(reply: Callable[[dict], Reply]) -> Iterator[StandIn]:
    stand_in = StandIn(reply)
    thread = threading.Thread(target=stand_in._server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stand_in
    finally:
        stand_in._server.shutdown()
        stand_in._server.server_close()
        thread.join()
