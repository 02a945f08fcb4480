"""What a model computes at its answers' tokens: the hidden states at some layers, and the token that it then expects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang_patches.early_exit.answers import Text

LONGEST = 4096  # tokens of a text that are run


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
