"""`specstore collect` as a user runs it: in a shell on a terminal, against a real server, interrupted and continued."""

from __future__ import annotations

import json
import os
import random
import shlex
import string
import subprocess
import threading
from pathlib import Path

import pytest

from sglang_patches.launch.serve import SPECSTORE
from tests.e2e.services import TOKEN
from tests.support.servers.engine import ServerSpec
from tests.support.servers.forked import running
from tests.support.tiny_model import write_spelling_model
from tests.waiting import eventually

TENANT, ROUNDS, TOKENS, MATCH = "collect", 2, 64, 8
ENVIRONMENT = os.environ | {"SPECSTORE_ADMIN_TOKEN": TOKEN}
CTRL_C = b"\x03"
PROMPTS = ["".join(random.Random(i).choices(string.ascii_lowercase, k=6 + i)) for i in range(40)]


class Shell:
    """A command in a shell that has a terminal of its own, as a window of a user's has. output: what it has shown."""

    def __init__(self, command: str) -> None:
        self.output = ""
        self._terminal, inside = os.openpty()
        self._process = subprocess.Popen(
            ["setsid", "--ctty", "bash", "-c", f"{command}; echo status $?"],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env=ENVIRONMENT | {"TERM": "xterm", "COLUMNS": "300"},
        )
        os.close(inside)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def press(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def wait(self) -> str:
        """All that it has shown, once it has ended."""
        self._process.wait(120)
        self._reader.join(60)
        os.close(self._terminal)
        return self.output

    def _read(self) -> None:
        try:
            while shown := os.read(self._terminal, 1 << 16):
                self.output += shown.decode(errors="replace")
        except OSError:  # how Linux tells that nobody has the terminal open any more
            return


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_spelling_model(tmp_path_factory.mktemp("collected"))


@pytest.fixture(scope="module")
def server(model, datastore_endpoint, logs):
    flags = ("--context-length", "512", "--specstore-endpoint", datastore_endpoint)
    flags += ("--specstore-tenant", TENANT, "--specstore-length", "static")
    spec = ServerSpec("collected", model, "SSSD", "float32", nodes=7, flags=flags, max_total_tokens=8192)
    with running(spec, logs) as server:
        yield server


def specstore(*words: object) -> dict | list:
    command = [*SPECSTORE, *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


def test_an_interrupted_run_is_continued_to_a_prior_that_drafts(server, model, datastore_endpoint, tmp_path):
    prompts, out, prior = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl", tmp_path / "prior"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    words = [*SPECSTORE, "collect", prompts, "--server", server.url, "--out", out, "--rounds", ROUNDS]
    words += ["--max-tokens", TOKENS, "--concurrency", 2, "--prior", prior, "--tokenizer", model]
    words += ["--live", "--endpoint", datastore_endpoint, "--model", model.name, "--tenant", TENANT]
    command, all_of_them = shlex.join(map(str, words)), ROUNDS * len(PROMPTS)

    before = live_tokens(datastore_endpoint)  # what SGLang asks itself when it starts
    shell = Shell(command)
    eventually(lambda: len(lines(out)) > 2, "no answers yet", seconds=60)
    shell.press(CTRL_C)
    shown = shell.wait()
    kept = lines(out)
    assert f"specstore: interrupted; {len(kept)} of {all_of_them} answers are in {out}" in shown, shown
    assert "status 130" in shown and len(kept) < all_of_them and not prior.exists()

    shown = Shell(command).wait()
    assert "status 0" in shown and f"{len(kept)}/{all_of_them}" in shown, (
        shown
    )  # the bar begins where the first ended
    assert lines(out)[: len(kept)] == kept
    rows = [json.loads(line) for line in lines(out)]
    asked = [(text, number) for number in range(1, ROUNDS + 1) for text in PROMPTS]
    assert sorted((row["prompt"], row["round"]) for row in rows) == sorted(asked)
    assert_is_in_the_prior(rows, prior, model)
    added = live_tokens(datastore_endpoint) - before
    assert added == sum(len(row["tokens"]) for row in rows)  # by --live: the server itself published none

    greedy = {row["prompt"]: row for row in rows if row["round"] == 1}
    for prompt in PROMPTS[:4]:
        answer = server.generate(spelled(prompt, model), temperature=0, max_new_tokens=TOKENS)
        assert (greedy[prompt]["answer"], greedy[prompt]["tokens"]) == (answer["text"], answer["output_ids"])


def assert_is_in_the_prior(rows: list[dict], prior: Path, model: Path) -> None:
    """Its documents are the answers, and what it drafts after the beginning of one has how an answer goes on.
    The most likely token may be that of a shorter match, as most answers are sampled."""
    from datastore_service.storage.manifest import open_segments

    (segment,) = open_segments(prior)
    answers = [row["tokens"] for row in rows]
    assert sorted(segment.document(i).tolist() for i in range(segment.documents)) == sorted(answers)
    greedy = next(row["tokens"] for row in rows if (row["prompt"], row["round"]) == (PROMPTS[0], 1))
    context = greedy[:MATCH]
    nodes = specstore("query", " ".join(map(str, context)), "--ids", "--prior", prior, "--tokenizer", model)
    ends = range(MATCH, TOKENS)
    following = {answer[end] for answer in answers for end in ends if answer[end - MATCH : end] == context}
    drafted = {node["token"] for node in nodes if node["parent"] < 0 and node["tier"] == "prior"}
    assert drafted & following, nodes


def live_tokens(endpoint: str) -> int:
    """Once the server is connected and none of its own requests is open."""
    found: list[dict] = []

    def at_rest() -> bool:
        spaces = specstore("stats", "--endpoint", endpoint)["namespaces"]
        found[:] = [space for space in spaces if space["namespace"]["tenant"] == TENANT]
        return len(found) == 1 and int(found[0].get("sessions", 0)) == 0

    eventually(at_rest, "it is not connected, or sessions are left")
    return next(int(tier["tokens"]) for tier in found[0]["tiers"] if tier["tier"] == "TIER_LIVE")


def spelled(text: str, model: Path) -> list[int]:
    """The prompt's ids: the model's chat template adds nothing."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
