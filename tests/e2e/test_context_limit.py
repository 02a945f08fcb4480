"""Requests that end at the context limit, from every distance: right tokens, and the server lives on.

CI runs the widest tree and a large page; `--long` runs every width with every page size.
"""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.servers import running
from tests.support.tiny_model import VOCABULARY

CONTEXT = 256
END = CONTEXT - 2  # SGLang keeps two tokens of the context free
NEAREST = 5  # and takes prompts up to six tokens below it
LONG = pytest.mark.long
CASES = [
    pytest.param(64, 1, id="width 64"),
    pytest.param(4, 16, id="width 4, page 16"),
    pytest.param(4, 1, id="width 4", marks=LONG),
    pytest.param(16, 1, id="width 16", marks=LONG),
    pytest.param(16, 16, id="width 16, page 16", marks=LONG),
    pytest.param(64, 16, id="width 64, page 16", marks=LONG),
]


def _prompt(length: int) -> list[int]:
    """A phrase over and over, so that trees are wide and deep."""
    phrase = random.Random(5).choices(range(2, VOCABULARY), k=7)
    return (phrase * length)[:length]


def _answers(server, prompts: list[list[int]], lengths: list[int], batch: int) -> list[list[int]]:
    def answer(prompt: list[int], length: int) -> list[int]:
        greedy = {"temperature": 0, "ignore_eos": True, "max_new_tokens": length}
        return server.generate(prompt, **greedy)["output_ids"]

    with ThreadPoolExecutor(batch) as pool:
        return list(pool.map(answer, prompts, lengths))


@pytest.mark.parametrize(("width", "page_size"), CASES)
def test_every_distance_from_the_limit(tiny_model, tiny_plain, logs, width, page_size):
    distances = list(range(NEAREST, 2 * width + 8))
    prompts = [_prompt(END - distance) for distance in distances]
    expected = _answers(tiny_plain, prompts, distances, 8)
    spec = ServerSpec(
        f"limit-{width}-{page_size}",
        tiny_model,
        "SSSD",
        dtype="float32",
        nodes=width - 1,
        flags=["--context-length", str(CONTEXT), "--page-size", str(page_size)],
        environment={"SPECSTORE_LENGTH": "static"},
        max_total_tokens=4096,
    )
    with running(spec, logs) as server:
        for batch in (4, 1):
            assert _answers(server, prompts, distances, batch) == expected
        assert server.answers("health_generate")
