"""No client of ours goes through a proxy that the environment names: it could read tokens, and cannot reach a loopback address."""

import ast
import asyncio
from pathlib import Path

import grpc
import pytest
from prometheus_client import start_http_server

import benchmarks
import datastore_service
import sglang_patches
from datastore_service.answers.chat_server import ChatServer
from datastore_service.client.channel import open_channel
from sglang_patches.launch.router import _healthy
from sglang_patches.launch.serve import http_healthy
from tests.support import servers
from tests.support.servers.metrics import samples
from tests.unit.answers.stand_in import answered, standing_in
from tests.unit.server.service import running

NOBODY = "http://127.0.0.1:1"
ALONE = {
    "requests": "proxies",
    "httpx.AsyncClient": "trust_env",
}  # a client's call, and what it must be given
HTTP_METHODS = {"get", "post", "put", "delete", "request"}


@pytest.fixture(autouse=True)
def proxied(monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        for each in (name, name.upper()):
            monkeypatch.setenv(each, NOBODY)
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)


def test_a_datastore_s_channel_is_direct():
    with running() as service, open_channel(service.endpoint) as channel:
        grpc.channel_ready_future(channel).result(timeout=30)


def test_a_model_server_is_asked_directly():
    async def check(url: str) -> None:
        async with ChatServer(url) as server:
            await server.check()

    with standing_in(lambda body: answered("so")) as server:
        asyncio.run(check(server.url))


def test_a_launcher_asks_its_servers_directly():
    with standing_in(lambda body: answered("so")) as server:
        assert http_healthy(int(server.url.rpartition(":")[2]))
        assert _healthy(server.url)
    page, _ = start_http_server(0, "127.0.0.1")
    try:
        assert samples(f"http://127.0.0.1:{page.server_port}")
    finally:
        page.shutdown()
        page.server_close()


def test_no_other_client_looks_at_the_environment():
    """Whoever calls one of these libraries says so; the rest do not look, or are named above. The servers of tests and benchmarks too."""
    found = 0
    for package in (datastore_service, sglang_patches, benchmarks, servers):
        for file in Path(package.__file__).parent.rglob("*.py"):
            for call in (
                node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)
            ):
                name = ast.unparse(call.func)
                library, _, method = name.rpartition(".")
                wanted = ALONE.get(name) or (ALONE.get(library) if method in HTTP_METHODS else None)
                if wanted:
                    found += 1
                    assert wanted in {word.arg for word in call.keywords}, f"{file}:{call.lineno}"
                assert name not in ("urllib.request.urlopen", "urlopen", "grpc.aio.insecure_channel")
    assert found >= 8
