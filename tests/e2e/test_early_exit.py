"""A server that reads an early exit of its target, trained by the documented command: it computes the same, and does not start with
another model's."""

import functools
import json
import os
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sglang_patches.launch.processes import ChildDiedError
from sglang_patches.training.__main__ import main
from tests.support.servers.engine import ServerSpec
from tests.support.servers.forked import running
from tests.support.servers.metrics import metric
from tests.support.tiny_exits import BEGUN
from tests.support.tiny_model import texts_of, write_spelling_model
from tests.waiting import eventually

TWICE_PLUGIN = Path(__file__).parent / "twice_plugin"
LONG = pytest.param("float32", marks=pytest.mark.long)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_spelling_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def exits(model, tmp_path_factory):
    """From answers as `specstore collect` writes them."""
    folder, tokenizer = tmp_path_factory.mktemp("exits"), AutoTokenizer.from_pretrained(model)
    answers, out = folder / "answers.jsonl", folder / "exits.safetensors"
    with answers.open("w") as file:
        for text in texts_of(model, 20, 64):
            prompt, answer = (tokenizer.decode(part) for part in (text[:BEGUN], text[BEGUN:]))
            print(json.dumps({"prompt": prompt, "answer": answer, "tokens": text[BEGUN:]}), file=file)
    given = ["--model", model, "--answers", answers, "--out", out, "--epochs", 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["training", "exits", *map(str, given)])
        assert main() == 0
    return out


def spec(name, model, exits, dtype="float32", **environment):
    return ServerSpec(
        name,
        model,
        "MIRROR",
        dtype=dtype,
        draft=model,
        flags=("--context-length", "512", "--enable-metrics"),
        environment={"SPECSTORE_EARLY_EXIT": str(exits), **environment},
        max_total_tokens=4096,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", LONG])
def test_the_logits_are_the_same_bits(model, exits, logs, tmp_path, dtype):
    file = tmp_path / "verifications"
    path = os.pathsep.join(filter(None, [str(TWICE_PLUGIN), os.environ.get("PYTHONPATH", "")]))
    watched = spec(f"twice-{dtype}", model, exits, dtype, PYTHONPATH=path, SPECSTORE_TWICE_FILE=str(file))
    with running(watched, logs) as server:
        for prompt in texts_of(model, 6, 40):
            server.generate(prompt, temperature=0, max_new_tokens=48)
        told = functools.partial(metric, server.url, "specstore_early_exit_tokens_total")
        eventually(lambda: told(choice="first") + told(choice="other") > 20, "the draft process heard little")
    lines = file.read_text().splitlines()
    assert len(lines) >= 20 and {line.split()[0] for line in lines} == {"same"}
    assert max(int(line.split()[1]) for line in lines) > 1


def test_another_model_s_exits_are_refused_by_name(tiny_model, exits, logs):
    with (
        pytest.raises(ChildDiedError, match="other-exits"),
        running(spec("other-exits", tiny_model, exits), logs),
    ):
        raise AssertionError("the server became healthy")
    refusal = f"specstore option early_exit: {exits}: is of the model with fingerprint"
    eventually(lambda: refusal in (logs / "other-exits.log").read_text(), "the log does not say why")
