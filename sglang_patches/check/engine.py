"""`python -m sglang_patches.check.engine SOCKET SGLANG-FLAGS...`: an engine in a process of its own that answers as a check asks."""

from __future__ import annotations

import argparse
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

DRAFT_PROCESS = "sglang_patches.draft_process"
BACK_SECONDS = 300.0  # a draft process that was killed is ready again after a pause and its start
POLL_SECONDS = 0.001
FEWEST = 8  # prompts of a batch size


def main() -> None:
    """Says when the engine is ready, then answers each (task, arguments) until the other side hangs up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("socket", help="path of the socket on which the check listens")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="SGLang's")
    given = parser.parse_args()
    calling = socket.socket(socket.AF_UNIX)
    calling.connect(given.socket)
    connection = Connection(calling.detach())
    engine = start(given.flags)
    connection.send(None)
    while True:
        try:
            task, arguments = connection.recv()
        except EOFError:
            return
        connection.send(TASKS[task](engine, **arguments))


def start(flags: Sequence[str]) -> Engine:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from sglang_patches.check.pinned import run_scheduler

    class PinnedEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)

    load_plugins()  # some versions of SGLang resolve the arguments at once
    return PinnedEngine(server_args=prepare_server_args([*flags, "--enable-metrics"]))


def answer(
    engine: Engine, prompts: list[str], rounds: int, tokens: int, temperature: float, logprobs: bool
) -> dict:
    """The fields of `comparison.Answers`. rounds: times that all prompts are asked, at once each time. logprobs: whether log-probabilities
    are asked for, which makes a step wait for the accelerator."""
    answers: list[dict] = []
    for _ in range(rounds):
        answers += _answers(engine, prompts, tokens, temperature, logprobs)
    return summary(answers, engine)


def _answers(
    engine: Engine, prompts: list[str], tokens: int, temperature: float = 0.0, logprobs: bool = False
) -> list[dict]:
    sampling = {"temperature": temperature, "max_new_tokens": tokens}
    answers = engine.generate(prompts, sampling, return_logprob=logprobs, top_logprobs_num=2 * logprobs)
    assert isinstance(answers, list)
    return answers


def summary(answers: Sequence[dict], engine: Engine) -> dict:
    """The fields of `comparison.Answers`."""
    infos = [answer["meta_info"] for answer in answers]
    tops = [info.get("output_top_logprobs", ()) for info in infos]
    return {
        "dtype": str(engine.tokenizer_manager.model_config.dtype).removeprefix("torch."),
        "prompts": [info["prompt_tokens"] for info in infos],
        "tokens": [answer["output_ids"] for answer in answers],
        "logprobs": [[token[0] for token in info.get("output_token_logprobs", ())] for info in infos],
        "margins": [[first[0] - second[0] for first, second in top] for top in tops],
        "tokens_per_step": tokens_per_step(infos),
        "accepted": _accepted(infos),
    }


def _accepted(infos: Sequence[dict]) -> dict[str, int]:
    """Drafted tokens in the answers, by who proposed them; empty for plain decoding."""
    total: dict[str, int] = {}
    for info in infos:
        for source, count in info.get("specstore", {}).get("accepted", {}).items():
            total[source] = total.get(source, 0) + count
    return total


def tokens_per_step(infos: Sequence[dict]) -> float:
    """Mean tokens of a decode step, over all answers. The first token of each answer is the prefill's and does not count."""
    decoded = [info["completion_tokens"] - 1 for info in infos]
    steps = sum(info.get("spec_verify_ct") or count for info, count in zip(infos, decoded, strict=True))
    return sum(decoded) / max(1, steps)


def kill_draft(engine: Engine, prompts: list[str], tokens: int) -> dict:
    """Answers without a pause while the draft process is killed, until it is ready again, and once more after that. Returns `answers`, with
    the fields of `comparison.Answers`, `restarts`, and `back_seconds` from the kill until it was ready. Raises TimeoutError if it
    does not come back, RuntimeError if there is none."""
    killer = _Killer()
    answers: list[dict] = []
    killer.start()
    while True:
        back = killer.is_back()
        answers += _answers(engine, prompts, tokens)
        if back:
            return {
                "answers": summary(answers, engine),
                "restarts": _restarts(),
                "back_seconds": back,
            }


class _Killer(threading.Thread):
    """Kills the draft process once, when a decode step has begun."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._process = draft_process()
        self._steps, self._restarts = _steps_begun(), _restarts()
        self._killed: float | None = None

    def run(self) -> None:
        while _steps_begun() == self._steps:
            time.sleep(POLL_SECONDS)
        self._process.kill()
        self._killed = time.monotonic()

    def is_back(self) -> float | None:
        """Seconds from the kill until now if another one is ready, None if it is not yet."""
        over = not self.is_alive()
        if self._killed is None:
            if over:
                raise RuntimeError("the draft process could not be killed")
            return None
        seconds = time.monotonic() - self._killed
        if _restarts() > self._restarts and metric("specstore_draft_up"):
            return seconds
        if seconds > BACK_SECONDS:
            raise TimeoutError(f"the draft process did not come back within {BACK_SECONDS:.0f} s")
        return None


def draft_process() -> psutil.Process:
    """This engine's. Raises RuntimeError if there is none."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # another one, which has ended
            if DRAFT_PROCESS in " ".join(child.cmdline()):
                return child
    raise RuntimeError("the engine has no draft process")


def _steps_begun() -> float:
    return metric("specstore_decode_phase_seconds_total", phase="draft")


def _restarts() -> float:
    return metric("specstore_draft_restarts_total")


def metric(name: str, **labels: str) -> float:
    """The sum over this engine's processes of the samples with these labels."""
    from prometheus_client import CollectorRegistry, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    samples = (sample for family in registry.collect() for sample in family.samples)
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


def measure_speed(engine: Engine, prompts: list[str], batches: list[int], tokens: int) -> dict:
    """Measures tokens a second and tokens a step, by batch size. No prompt is asked twice: the datastore would have its answer. The
    prompts are prefilled before the time begins; a batch ends with its slowest request."""
    left = iter(prompts)
    found = {}
    for batch in batches:
        count = max(batch, FEWEST)
        asked = [next(left) for _ in range(count)]
        engine.generate(asked, {"temperature": 0, "max_new_tokens": 1})
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        began, infos = time.perf_counter(), []
        for first in range(0, count, batch):
            answers = engine.generate(asked[first : first + batch], sampling)
            infos += [answer["meta_info"] for answer in answers]
        seconds = time.perf_counter() - began
        found[str(batch)] = {
            "tokens_per_second": sum(info["completion_tokens"] for info in infos) / seconds,
            "tokens_per_step": tokens_per_step(infos),
        }
    return found


TASKS: dict[str, Callable[..., Any]] = {"answer": answer, "kill draft": kill_draft, "speed": measure_speed}


if __name__ == "__main__":
    main()
