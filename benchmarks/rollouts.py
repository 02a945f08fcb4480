"""`python -m benchmarks.rollouts`: steps that drafts save in a GRPO-like loop, and what text of older weights does to them.

A model answers each prompt several times, is trained on the answers' rewards, and the server gets the new weights by SGLang's own call.
Plain decoding and SSSD with a service go through the same loop in float32. Each answer explores with noise of its own on the logits, the
same in both, so their answers must be the same. They are then replayed on a virtual clock, the roofline of a GPU, with text of older
epochs kept and dropped; also as if an update had turned every second token, so that older text misleads."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import requests

from benchmarks.options import Parser
from benchmarks.playback import Playback
from benchmarks.prompts import SHIPPED, chat_ids, load_prompts, spread
from benchmarks.report.records import finish
from benchmarks.roofline import LLAMA_3_8B, Hardware, step_seconds
from benchmarks.traces import Trace
from datastore_service.engine.engine import Engine
from datastore_service.protocol.types import NO_DRAFT, Budget, Entry, Opening
from sglang_patches.demo.model import ensure
from sglang_patches.launch.processes import PROXIES
from sglang_patches.step.length import CANDIDATE_WIDTHS, LengthPolicy
from tests.support.servers.datastore import DatastoreService
from tests.support.servers.engine import ServerSpec, SglangServer, running

H100 = Hardware(989.0, 3.35)
CONTEXT = 1024  # tokens of a request, for the time of a step
TRAINED_BLOCKS = 2  # the last of the model
PLAIN, KEPT, DROPPED = "plain", "kept", "dropped"  # what becomes of older text

Epochs = list[list[Trace]]  # the answers of each epoch, a prompt's siblings one after the other


class Trainer:
    """The last blocks of the model, trained to say even token ids."""

    def __init__(self, model: Path, rate: float) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).requires_grad_(False)
        blocks = self._model.model.layers[-TRAINED_BLOCKS:].requires_grad_()
        self._optimizer = torch.optim.Adam(blocks.parameters(), rate)

    def learn(self, answers: Sequence[Trace], siblings: int, out: Path) -> float:
        """A step of policy gradient with advantages within each group; saves the weights and returns the mean reward."""
        import torch

        rewards = torch.tensor([float((answer.output % 2 == 0).mean()) for answer in answers])
        for begin in range(0, len(answers), siblings):
            group, reward = answers[begin : begin + siblings], rewards[begin : begin + siblings]
            ids = torch.tensor(np.stack([np.append(each.prompt, each.output) for each in group])).long()
            first = len(group[0].prompt)
            said = self._model(ids).logits[:, first - 1 : -1].log_softmax(-1).gather(-1, ids[:, first:, None])
            advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
            (-(advantage * said[..., 0].mean(1)).mean()).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._model.save_pretrained(out)
        return float(rewards.mean())


def rollouts(
    server: SglangServer, prompts: Sequence[list[int]], given: argparse.Namespace, epoch: int
) -> tuple[list[Trace], int]:
    """Each prompt's answers, and the steps that all of them took."""

    def ask(place: int) -> dict:
        of_prompt = place // given.siblings
        noise = np.random.default_rng((epoch, place)).gumbel(size=given.noisy).round(2).tolist()
        return server.generate(
            prompts[of_prompt], temperature=0, max_new_tokens=given.tokens, ignore_eos=True,
            logit_bias={str(token): bias for token, bias in enumerate(noise)},
            custom_params={"specstore": {"group": f"epoch {epoch}, prompt {of_prompt}"}},
        )  # fmt: skip

    places = range(len(prompts) * given.siblings)
    with ThreadPoolExecutor(len(places)) as pool:
        said = list(pool.map(ask, places))
    names = [place // given.siblings for place in places]
    answers = [Trace(str(name), np.array(prompts[name], np.int32), np.array(each["output_ids"], np.int32)) for name, each in zip(names, said, strict=True)]  # fmt: skip
    return answers, sum(
        each["meta_info"].get("specstore", {"steps": given.tokens - 1})["steps"] for each in said
    )


def served(given: argparse.Namespace, folder: Path) -> tuple[Epochs, list[dict]]:
    """The answers, and what was counted. Raises RuntimeError if an answer depends on drafts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    given.noisy = min(given.noisy, len(tokenizer))
    prompts = chat_ids(tokenizer, spread(load_prompts(SHIPPED), given.prompts))
    trainer, epochs, rows = Trainer(given.model, given.rate), [], []
    for algorithm in (None, "SSSD"):
        with ExitStack() as stack:
            service = stack.enter_context(DatastoreService(folder / "datastore.log"))
            flags = ("--specstore-endpoint", service.endpoint, "--specstore-deadline-ms", "10000")
            batch = len(prompts) * given.siblings
            spec = ServerSpec(algorithm or PLAIN, given.model, algorithm, "float32", given.nodes, flags=flags if algorithm else (), max_running_requests=batch)  # fmt: skip
            server = stack.enter_context(running(spec, folder))
            for epoch in range(given.epochs):
                answers, steps = rollouts(server, prompts, given, epoch)
                weights = folder / str(epoch)
                if algorithm is None:
                    epochs.append(answers)
                    reward = trainer.learn(answers, given.siblings, weights)
                    rows.append({"epoch": epoch, "reward": reward, "plain_steps": steps})
                elif any(
                    (new.output != old.output).any() for new, old in zip(answers, epochs[epoch], strict=True)
                ):
                    raise RuntimeError(f"epoch {epoch}: an answer is not plain decoding's")
                else:
                    rows[epoch]["steps"] = steps
                update = {"model_path": str(weights)}
                requests.post(
                    server.url + "/update_weights_from_disk", json=update, timeout=600, proxies=PROXIES
                ).raise_for_status()
    return epochs, rows


def replayed(epochs: Epochs, text: str, group: bool, nodes: int, vocab_size: int) -> list[dict[str, float]]:
    """SSSD's worker without a model: what each epoch takes. text: what becomes of older epochs' text."""
    engine, batch = Engine(vocab_size), len(epochs[0])
    widths = [1] if text == PLAIN else [*(width for width in CANDIDATE_WIDTHS if width <= nodes), nodes + 1]

    def seconds(size: int, width: float) -> float:
        return step_seconds(LLAMA_3_8B, H100, size, max(1, round(width)), CONTEXT)

    policy, found = LengthPolicy(widths, lambda rows: seconds(batch, rows / batch)), []
    for width in widths * 20:  # the server has measured its steps before
        policy.times.observe(batch, batch * width, seconds(batch, width))
    for epoch, traces in enumerate(epochs):
        if text == DROPPED:  # once the epoch has begun, which an opening tells
            engine.step([Entry("first", opening=Opening(epoch=epoch), closing=True)])
            engine.keep_epochs(1)
        policy.acceptance.weights_changed()
        found.append(counts := dict.fromkeys(("steps", "rows", "tokens", "seconds"), 0.0))
        openings = [Opening(prompt_length=len(trace.prompt), group=f"{epoch}-{trace.category}" if group else "", epoch=epoch) for trace in traces]  # fmt: skip
        places = [Playback(f"{epoch}-{place}", np.append(trace.prompt, trace.output), len(trace.prompt) + 1, openings[place]) for place, trace in enumerate(traces)]  # fmt: skip
        while places:
            size = len(places)
            budget = Budget(nodes) if policy.wants_draft(size) else NO_DRAFT
            trees = [reply.tree for reply in engine.step([place.entry(budget) for place in places])]
            chosen = policy.choose(trees)
            for place, tree, width in zip(places, trees, chosen.tolist(), strict=True):
                verified = tree.first(width - 1)
                accepted = place.accepted(verified)
                policy.acceptance.observe("", [verified], accepted)
                counts["tokens"] += place.advance(int(accepted.sum()) + 1)
            took = seconds(size, float(chosen.mean()))
            policy.times.observe(size, int(chosen.sum()), took)
            for name, more in (("steps", size), ("rows", float(chosen.sum())), ("seconds", took)):
                counts[name] += more
            engine.step([place.closing() for place in places if place.ended])
            places = [place for place in places if not place.ended]
    return found


def summary(epochs: Epochs, nodes: int) -> list[dict]:
    vocab_size = 2 + max(
        int(np.append(trace.prompt, trace.output).max()) for traces in epochs for trace in traces
    )
    turn = np.arange(len(epochs[0][0].output)) % 2 == 0
    turned = [[replace(trace, output=(trace.output + turn * (epoch >= len(epochs) // 2)).astype(np.int32)) for trace in traces] for epoch, traces in enumerate(epochs)]  # fmt: skip
    rows = []
    for weights, texts, group in (
        ("as trained", epochs, True),
        ("as trained", epochs, False),
        ("turned", turned, True),
        ("turned", turned, False),
    ):
        plain = replayed(texts, PLAIN, group, nodes, vocab_size)
        for text in (KEPT, DROPPED):
            for epoch, of in enumerate(replayed(texts, text, group, nodes, vocab_size)):
                rows.append({
                    "weights": weights, "group": group, "text": text, "epoch": epoch, "tokens_per_step": of["tokens"] / of["steps"],
                    "rows_per_token": of["rows"] / of["tokens"], "over_plain": plain[epoch]["seconds"] / of["seconds"],
                })  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("rollouts", __doc__)
    parser.add("--model", None, "folder of the model (default: the demo model)", type=Path)
    parser.add("--prompts", 3, "that are answered in each epoch")
    parser.add("--siblings", 8, "answers to each")
    parser.add("--epochs", 5, "updates of the weights")
    parser.add("--tokens", 32, "of an answer")
    parser.add("--rate", 1e-4, "of learning")
    parser.add("--nodes", 15, "drafted tokens a tree")
    parser.add("--noisy", 4096, "token ids, the lowest, whose logits get noise")
    given = parser.parse_args(argv)
    given.model = given.model or ensure()
    with tempfile.TemporaryDirectory() as folder:
        epochs, rows = served(given, Path(folder))
    finish("rollouts", given, [SHIPPED], served=rows, replayed=summary(epochs, given.nodes))


if __name__ == "__main__":
    main()
