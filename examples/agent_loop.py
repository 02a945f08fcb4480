"""An agent's loop with OpenAI's client: read a file, ask the model for an edit, test it, and say what failed.

    make serve
    python examples/agent_loop.py [--url http://127.0.0.1:30000/v1] [--turns 3] [--plainly]

Each turn sends the file as `prediction`, so that lines which stay are drafted, and names the session, so that what was said in earlier turns
drafts too; with `--plainly` it does neither. It prints how many tokens each answer has, and how many steps of the model they took. An edit that
fails its tests is taken back, so a small model does no harm to the file. The tests run what the model has written: the folder is a
temporary one, but it is no sandbox.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

FILE, TESTS = "basket.py", "test_basket.py"
SOURCE = '''"""A basket of fruit, with prices in cents."""

PRICES = {"apple": 30, "pear": 45, "plum": 12, "melon": 250}


def total(basket):
    """The price of all fruit in the basket, which has the number of each."""
    result = 0
    for fruit, number in basket.items():
        result += PRICES[fruit] * number
    return result


def average(basket):
    """The price of one piece of fruit, rounded down."""
    return total(basket) // sum(basket.values())
'''
TEST_SOURCE = """import unittest

from basket import average, total


class Basket(unittest.TestCase):
    def test_total(self):
        self.assertEqual(total({"apple": 2, "plum": 1}), 72)

    def test_average_of_nothing(self):
        self.assertEqual(average({}), 0)
"""
WISH = "Repeat the whole file, with a fixed function `average`."
TASK = "Repeat this Python file:\n\n```python\n{}```\n\n" + WISH
AGAIN = "The tests say: {}\n\n" + WISH
MOST_TOKENS = 160  # of an answer
TEST_SECONDS = 20


@dataclass(frozen=True)
class Turn:
    """tokens: of the answer. steps: forwards of the model after the prompt's. predicted: tokens that the prediction had drafted."""

    tokens: int
    steps: int
    predicted: int
    passed: bool

    def __str__(self) -> str:
        outcome = "tests pass" if self.passed else "tests fail, the edit is taken back"
        return (
            f"{self.tokens} tokens in {self.steps} steps, {self.tokens / max(1, self.steps):.2f} a step, "
            f"{self.predicted} of them predicted: {outcome}"
        )


class Agent:
    """plainly: without a prediction and without a name of the session."""

    def __init__(self, client: OpenAI, folder: Path, plainly: bool) -> None:
        self._client, self._folder = client, folder
        self._model = client.models.list().data[0].id
        self._session = None if plainly else str(uuid.uuid4())
        self._said: list[ChatCompletionMessageParam] = []

    def turn(self, failure: str) -> Turn:
        """Asks for an edit and tests it. failure: what the tests say of the file as it is."""
        path = self._folder / FILE
        source = path.read_text()
        message = AGAIN.format(failure) if self._said else TASK.format(source)
        answer = self._ask(message, source)
        path.write_text(edited(answer.choices[0].message.content or ""))
        passed = not failing_tests(self._folder)
        if not passed:
            path.write_text(source)
        return turn_of(answer, passed)

    def _ask(self, message: str, source: str) -> ChatCompletion:
        self._said.append({"role": "user", "content": message})
        hints = {}
        if self._session:
            prediction = {"type": "content", "content": source}
            hints = {"prompt_cache_key": self._session, "prediction": prediction}
        answer = self._client.chat.completions.create(
            model=self._model,
            messages=self._said,
            max_tokens=MOST_TOKENS,
            temperature=0,
            extra_body={"return_spec_tokens_details": True, **hints},
        )
        self._said.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        return answer


def turn_of(answer: ChatCompletion, passed: bool) -> Turn:
    """What the server says of an answer. One without speculation says nothing: there a step is a token, and the first is the prompt's."""
    usage, details = answer.usage, ((answer.model_extra or {}).get("sglext") or {}).get("spec_tokens_details")
    assert usage is not None
    steps = (details or {}).get("spec_verify_ct") or usage.completion_tokens - 1
    by_kind = usage.completion_tokens_details
    predicted = (by_kind and by_kind.accepted_prediction_tokens) or 0
    return Turn(usage.completion_tokens, steps, predicted, passed)


def edited(answer: str) -> str:
    """The code of an answer: its first fenced block, which may lack its end, or all of it."""
    block = re.search(r"```\w*\n(.*?)(?:```|\Z)", answer, re.DOTALL)
    return block[1] if block else answer


def failing_tests(folder: Path) -> str:
    """The last line of what the tests say, "" if they pass."""
    command = [sys.executable, "-I", "-B", "-m", "unittest", "discover", "-s", str(folder)]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TEST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end after {TEST_SECONDS} seconds"
    return "" if ran.returncode == 0 else ran.stderr.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000/v1", help="of the server's OpenAI API")
    parser.add_argument("--turns", type=int, default=3, help="most edits that are asked for")
    parser.add_argument("--plainly", action="store_true", help="no prediction, no name of the session")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / FILE).write_text(SOURCE)
        (folder / TESTS).write_text(TEST_SOURCE)
        agent, turns = Agent(OpenAI(base_url=given.url, api_key="none"), folder, given.plainly), []
        while len(turns) < given.turns and (failure := failing_tests(folder)):
            turns.append(agent.turn(failure))
            print(f"turn {len(turns)}: {turns[-1]}", flush=True)
    tokens, steps = sum(turn.tokens for turn in turns), sum(turn.steps for turn in turns)
    print(f"all: {tokens} tokens in {steps} steps, {tokens / max(1, steps):.2f} a step")


if __name__ == "__main__":
    main()
