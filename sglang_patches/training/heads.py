"""Trains an EAGLE-3 head on a model's own answers. The model stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from torch.nn.functional import cross_entropy, embedding, linear

from sglang_patches.training.answers import LONGEST, Text
from sglang_patches.training.eagle3 import Eagle3, read_layers
from sglang_patches.training.exits import bars, pace

RATE = 1e-3  # of learning, at its highest
DECAY = 0.05  # of weights
BATCH = 8  # texts
UNROLLED = 2  # steps of a draft that are trained
LATER = 0.8  # weight of a step's loss over the one before
VOCABULARY = 8192  # tokens that the head can say, at most
SHOWN = 3  # steps of a draft whose hits are told
HELD_OUT = 10  # of so many texts, one tells the hits and is not trained on


class Read(NamedTuple):
    """A text that the target has read.

    tokens: int64 [T]. states: [T, layers * H], the target's. last: [T, H], what its output layer reads. first: place of the answer's
    first token.
    """

    tokens: torch.Tensor
    states: torch.Tensor
    last: torch.Tensor
    first: int


@dataclass(frozen=True)
class Told:
    """A step of training.

    step, steps: number and how many there are. loss: nats a token.
    """

    step: int
    steps: int
    loss: float


def train_shown(model: Path, texts: Sequence[Text], out: Path, epochs: int, console: Console) -> None:
    """Trains a head into the folder, with a progress line and the hits at the end."""
    with bars(console) as shown:
        reading = shown.add_task("the model reads its answers", total=len(texts), note="")
        task = shown.add_task("training steps", total=None, note="")

        def told(step: Told) -> None:
            shown.update(task, completed=step.step, total=step.steps, note=f"loss {step.loss:.2f}")

        hits = train_head(model, texts, out, epochs, told, lambda: shown.advance(reading))
    by_step = ", ".join(f"{share:.0%}" for share in hits)
    console.print(f"of held-out tokens the head says rightly, by step of a draft: {by_step}")


def train_head(
    model: Path,
    texts: Sequence[Text],
    out: Path,
    epochs: int,
    told: Callable[[Told], None],
    has_read: Callable[[], object] = lambda: None,
) -> list[float]:
    """Writes a head for the model into the folder `out`. Returns the share of held-out tokens that each step of a draft says rightly
    behind the right text. Raises ValueError for a model that is no Llama, or too few answers.

    told: is called after each step.
    has_read: is called after each text that the model has read, before the first step.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    if config.model_type != "llama":
        raise ValueError(f"model: a {config.model_type}, a head is made for a llama")
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    torch.manual_seed(0)
    layers = read_layers(target.config.num_hidden_layers)
    read = list(read_texts(target, texts, layers, has_read))
    if len(read) < 2:
        raise ValueError(
            f"answers: {len(read)} of more than {SHOWN} tokens, give at least 2: some are held out"
        )
    every = min(HELD_OUT, len(read))
    held_out = read[every - 1 :: every]
    trained = [of for at, of in enumerate(read) if at % every != every - 1]
    head = Eagle3.of(target, layers, _frequent(trained, target.config.vocab_size))
    training = Training(head, target.get_input_embeddings().weight.detach())
    training.run(trained, epochs, told)
    head.save(out, config.dtype or torch.float32)
    return training.hits(held_out)


@torch.no_grad()  # what autograd may save, unlike inference mode's tensors
def read_texts(
    target, texts: Sequence[Text], layers: Sequence[int], has_read: Callable[[], object]
) -> Iterator[Read]:
    """The texts as the target reads them, without those of too few tokens to train on.

    target: a Llama of transformers.
    layers: numbers of layers below the states.
    has_read: is called after each text.
    """
    for prompt, answer in texts:
        tokens = torch.tensor([*prompt, *answer][:LONGEST])
        if len(tokens) > len(prompt) + SHOWN:
            out = target(tokens[None], output_hidden_states=True, use_cache=False, logits_to_keep=1)
            states = torch.cat([out.hidden_states[layer][0] for layer in layers], -1)
            yield Read(tokens, states, out.hidden_states[-1][0], len(prompt))
        has_read()


def _frequent(read: Sequence[Read], vocabulary: int) -> torch.Tensor:
    """The tokens that are most frequent in the answers, ascending."""
    counts = torch.bincount(torch.cat([of.tokens[of.first :] for of in read]), minlength=vocabulary)
    return counts.topk(min(VOCABULARY, vocabulary)).indices.sort().values


class Training:
    """Trains all of the head but its output layer, which stays the target's. The head is to expect what the target expects at each place
    of a text, of the tokens that both know.

    embeddings: [vocabulary, H], the target's.
    """

    def __init__(self, head: Eagle3, embeddings: torch.Tensor) -> None:
        self._head, self._embeddings = head, embeddings
        head.lm_head.weight.requires_grad_(False)
        self._weights = [weight for weight in head.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(self._weights, lr=RATE, betas=(0.9, 0.95), weight_decay=DECAY)

    def run(self, texts: Sequence[Read], epochs: int, told: Callable[[Told], None]) -> None:
        steps, step = epochs * -(-len(texts) // BATCH), 0
        for epoch in range(epochs):
            order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(epoch))
            for chosen in order.split(BATCH):
                for group in self._optimizer.param_groups:
                    group["lr"] = RATE * pace(step / steps)
                step += 1
                told(Told(step, steps, self._take_step([texts[at] for at in chosen.tolist()])))

    def _take_step(self, texts: Sequence[Read]) -> float:
        self._optimizer.zero_grad()
        weights = [LATER**step for step in range(UNROLLED)]
        count = sum(len(of.tokens) for of in texts) * sum(weights)
        total = 0.0
        for of in texts:
            expected = linear(of.last, self._head.lm_head.weight).softmax(-1)
            losses = [
                cross_entropy(self._head.logits(state), expected[1 + step : -1], reduction="sum")
                for step, state in enumerate(self._drafted(of, UNROLLED))
            ]
            loss = sum(weight * of_step for weight, of_step in zip(weights, losses, strict=True)) / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._optimizer.step()
        return total

    def _drafted(self, of: Read, steps: int) -> list[torch.Tensor]:
        """The head's states of each step."""
        return self._head.unroll(of.states[:-2], embedding(of.tokens[1:-1], self._embeddings), steps)

    @torch.inference_mode()
    def hits(self, texts: Sequence[Read]) -> list[float]:
        """The share of the answers' tokens that each of SHOWN steps says rightly, given the text up to its own."""
        right, total = torch.zeros(2, SHOWN)
        for of in texts:
            for step, state in enumerate(self._drafted(of, SHOWN)):
                begin = max(0, of.first - 2 - step)
                tokens = of.tokens[2 + step :][begin:]
                said = self._head.kept[self._head.logits(state[begin:]).argmax(-1)]
                right[step] += (said == tokens).sum()
                total[step] += len(tokens)
        return (right / total).tolist()
