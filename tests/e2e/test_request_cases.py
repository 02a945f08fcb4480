"""The request cases that need words, a chat template or a flag of the server: every answer is plain decoding's on the demo model.

The others run on a tiny model with all methods: tests/conformance/test_request_cases.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sglang_patches.demo.noise import noisy_draft
from sglang_patches.methods.registry import METHODS
from tests.conformance.request_cases import CASES, Client, Model, differences
from tests.support.servers.engine import ServerSpec
from tests.support.servers.forked import SglangServer, running
from tests.support.tiny_exits import train_poor_exits

pytestmark = pytest.mark.long

CONTEXT = 1024
FLAGS = ("--context-length", str(CONTEXT), "--chunked-prefill-size", "128", "--enable-return-hidden-states")
FLAGS += ("--enable-custom-logit-processor", "--reasoning-parser", "qwen3", "--tool-call-parser", "qwen25")
FLAGS += ("--enable-metrics", "--enable-cache-report")
DRAFTING = (
    "--specstore-endpoint",
    "embedded",
    "--specstore-deadline-ms",
    "200",
    "--specstore-length",
    "static",
)
SETUPS = {
    "overlap, prefix cache": (),
    "pages of 16, no prefix cache": ("--page-size", "16", "--disable-radix-cache"),
}
SIZES = {"dtype": "float32", "max_running_requests": 8, "max_total_tokens": 8192}
TEXTS = (
    "The small grey cat sleeps under the old oak tree. " * 6,
    "def first(row):\n    return row[0]\n\ndef last(row):\n    return row[-1]\n\n" * 3 + "def ",
    "red orange yellow green blue indigo violet " * 7,
    "<|im_start|>user\nWhich months have thirty days?<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture(scope="module")
def model(demo_model) -> Model:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    texts = [tokenizer(text)["input_ids"] for text in TEXTS]
    return Model(texts, len(tokenizer), tokenizer.eos_token_id, CONTEXT)


@pytest.fixture(scope="module")
def expected(demo_model, model, logs) -> Iterator[Callable[[str], Any]]:
    """Plain decoding's answer to a case. Without overlap: with it, stock plain decoding applies penalties a token late."""
    spec = ServerSpec("plain-cases", demo_model, flags=FLAGS, overlap=False, **SIZES)
    with running(spec, logs) as server:
        yield functools.cache(lambda name: CASES[name].ask(Client(server.url, model)))


@pytest.fixture(scope="module")
def poor_exits(demo_model, tmp_path_factory) -> Callable[[], Path]:
    """File of the demo model's early exits, made when it is first asked for."""
    return functools.cache(
        lambda: train_poor_exits(demo_model, tmp_path_factory.mktemp("exits") / "exits.safetensors")
    )


@pytest.fixture(scope="module", params=[(name, setup) for name in METHODS for setup in SETUPS], ids=", ".join)
def server(request, demo_model, poor_exits, logs) -> Iterator[SglangServer]:
    name, setup = request.param
    method, flags = METHODS[name], (*FLAGS, *DRAFTING, *SETUPS[setup])
    if method.early_exit:
        flags += ("--specstore-early-exit", str(poor_exits()))
    draft = noisy_draft(0.9) if method.draft_process else None
    spec = ServerSpec(f"cases-{name}-{len(flags)}", demo_model, name, draft=draft, flags=flags, **SIZES)
    with running(spec, logs) as server:
        yield server


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.demo])
def test_an_answer_is_plain_decodings(server, expected, model, name):
    plain = expected(name)
    assert differences(plain, CASES[name].ask(Client(server.url, model))) == []
