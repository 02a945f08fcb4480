"""What is trained on: a model's own answers, as `specstore collect` collects them, and what the model computes at their
tokens: the hidden states at some layers, and the token that it then expects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

LONGEST = 4096  # tokens of a text that are run


class Text(NamedTuple):
    """Token ids."""

    prompt: list[int]
    answer: list[int]


def read_answers(files: Sequence[Path], tokenizer) -> list[Text]:
    """One a line: an object with the strings `prompt` and `answer`, and the answer's token ids `tokens` where they are known. A prompt
    is one turn of a chat. tokenizer: of transformers. Raises ValueError that names file and line."""
    texts = [text for file in files for text in _of_file(file, tokenizer)]
    if not texts:
        raise ValueError(f"no answers in {', '.join(map(str, files))}")
    return texts


def _of_file(file: Path, tokenizer) -> Iterator[Text]:
    with file.open() as lines:
        for number, line in enumerate(lines, start=1):
            match _parsed(line):
                case {"prompt": str(prompt), "answer": str(answer)} as row:
                    ids = row.get("tokens")
                    if ids is None:
                        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
                    yield Text(as_chat(prompt, tokenizer), ids)
                case _:
                    raise ValueError(f"{file}: line {number}: no JSON object with `prompt` and `answer`")


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def as_chat(prompt: str, tokenizer) -> list[int]:
    """Token ids, as a server gives them to the model."""
    turns = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)


@dataclass(frozen=True)
class States:
    """A model's hidden states at the answers' tokens, and the token that it then expects.

    states: by layer, [tokens, H], on the host in the model's type.
    expected: int64 [tokens].
    text: int64 [tokens], the number of each token's text.
    """

    states: dict[int, torch.Tensor]
    expected: torch.Tensor
    text: torch.Tensor

    def __len__(self) -> int:
        return len(self.expected)

    def where(self, chosen: torch.Tensor) -> States:
        """The states of the chosen tokens.

        chosen: bool [tokens].
        """
        states = {layer: of_layer[chosen] for layer, of_layer in self.states.items()}
        return States(states, self.expected[chosen], self.text[chosen])


@torch.inference_mode()
def collect(model, texts: Sequence[Text], layers: Sequence[int], done: Callable[[int], None]) -> States:
    """Runs the texts and collects the model's states at the answers' tokens. Raises ValueError if the answers have no tokens.

    model: a causal model of transformers.
    layers: number of layers below each exit.
    done: is told the number of tokens of each text.
    """
    found: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
    expected, numbers = [], []
    for number, (prompt, answer) in enumerate(texts):
        ids = [*prompt, *answer][:LONGEST]
        first = len(prompt) - 1  # what follows the prompt is the answer's first token
        if len(ids) <= len(prompt):
            continue
        out = model(torch.tensor([ids], device=model.device), output_hidden_states=True, use_cache=False)
        for layer in layers:
            found[layer].append(out.hidden_states[layer][0, first:-1].cpu())
        expected.append(out.logits[0, first:-1].argmax(-1).cpu())
        numbers.append(torch.full_like(expected[-1], number))
        done(len(expected[-1]))
    if not expected:
        raise ValueError("the answers have no tokens")
    states = {layer: torch.cat(parts) for layer, parts in found.items()}
    return States(states, torch.cat(expected), torch.cat(numbers))
