"""Servers and models of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.prompts import Prompt, chat_ids, load_prompts
from benchmarks.servers import ServerSpec, SglangServer, running
from tests.e2e.services import DatastoreService
from tests.e2e.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def logs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def shipped_prompts() -> list[Prompt]:
    return load_prompts()


@pytest.fixture(scope="session")
def prompt_ids(demo_model, shipped_prompts) -> list[list[int]]:
    """The shipped prompts as the demo model's chat ids."""
    from transformers import AutoTokenizer

    return chat_ids(AutoTokenizer.from_pretrained(demo_model), shipped_prompts)


@pytest.fixture(scope="session")
def plain(demo_model, logs) -> Iterator[SglangServer]:
    """Plain decoding of the demo model in float32: what SSSD's answers are compared with."""
    with running(ServerSpec("plain", demo_model, dtype="float32"), logs) as server:
        yield server


@pytest.fixture(scope="session")
def datastore_endpoint(logs) -> Iterator[str]:
    """An empty datastore service that all tests of the session may share."""
    service = DatastoreService(logs / "datastore.log")
    try:
        service.start()
        yield service.endpoint
    finally:
        service.stop()
