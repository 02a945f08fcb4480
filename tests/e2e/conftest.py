"""Servers and models of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.prompts import Prompt, chat_ids, load_prompts, spread
from benchmarks.servers import ServerSpec, SglangServer, running
from tests.conftest import SHARED
from tests.e2e.services import serving
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
def workshop_ids(demo_model, prompt_ids) -> Callable[[int], list[list[int]]]:
    """Chat ids of so many workshop prompts over all categories where they are at hand, of the shipped ones elsewhere."""
    from transformers import AutoTokenizer

    def ids(count: int) -> list[list[int]]:
        if not SHARED.is_dir():
            return prompt_ids
        files = [SHARED / "data" / name for name in ("spec_bench.jsonl", "humaneval.jsonl", "gsm8k.jsonl")]
        prompts = spread([prompt for file in files for prompt in load_prompts(file)], count)
        # The longest prompts only add prefill time on a small machine.
        return [row[-600:] for row in chat_ids(AutoTokenizer.from_pretrained(demo_model), prompts)]

    return ids


@pytest.fixture(scope="session")
def plain(demo_model, logs) -> Iterator[SglangServer]:
    """Plain decoding of the demo model in float32: what SSSD's answers are compared with."""
    with running(ServerSpec("plain", demo_model, dtype="float32"), logs) as server:
        yield server


@pytest.fixture(scope="session")
def datastore_endpoint(logs) -> Iterator[str]:
    """An empty datastore service that all tests of the session may share."""
    with serving(logs / "datastore.log") as service:
        yield service.endpoint
