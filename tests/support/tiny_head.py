"""Heads of the tiny models, trained in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import pad
from transformers import LlamaConfig, LlamaForCausalLM

from sglang_patches.training.answers import Text
from sglang_patches.training.eagle3 import Eagle3, Passed, read_layers
from sglang_patches.training.heads import Training, read_texts, train_head
from tests.support.tiny_model import texts_of

BEGUN = 4  # tokens of a text that are its prompt
EPOCHS = 8


def train_tiny_head(name: str, model: Path, out: Path) -> Path:
    """A head of the model in the folder, trained on what that says of its own accord.

    name: EAGLE or EAGLE3.
    """
    texts = [Text(text[:BEGUN], text[BEGUN:]) for text in texts_of(model, 32, 64)]
    if name == "EAGLE3":
        train_head(model, texts, out, epochs=EPOCHS, told=lambda step: None)
    else:
        _train_eagle(model, texts).save(out, torch.float32)
    return out


def read_tiny_head(name: str, model: Path, folder: Path) -> Eagle3:
    """The head in the folder, as it drafts."""
    target = LlamaForCausalLM.from_pretrained(model)
    weights = load_file(folder / "model.safetensors")
    head = Eagle.read(target, weights) if name == "EAGLE" else _read_eagle3(target.config, weights, folder)
    return head.eval()


def _read_eagle3(config: LlamaConfig, weights: dict[str, torch.Tensor], folder: Path) -> Eagle3:
    layers = read_layers(config.num_hidden_layers)
    about = json.loads((folder / "config.json").read_text())
    assert about["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [layer - 1 for layer in layers]
    head = Eagle3(config, layers, weights.pop("d2t") + torch.arange(about["draft_vocab_size"]))
    weights.pop("t2d")
    head.load_state_dict(weights)
    return head


def _train_eagle(model: Path, texts: list[Text]) -> Eagle:
    target = LlamaForCausalLM.from_pretrained(model).eval()
    torch.manual_seed(0)
    head = Eagle.beside(target)
    training = Training(head, target.get_input_embeddings().weight.detach())
    training.run(list(read_texts(target, texts, head.layers, lambda: None)), EPOCHS, lambda step: None)
    return head


class Eagle(Eagle3):
    """An EAGLE head (arXiv 2401.15077). It reads the embedding and the target's last state through one matrix, and in later steps its own
    state. It says what the target's output layer makes of that."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, [config.num_hidden_layers], torch.arange(config.vocab_size))
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.midlayer.hidden_norm = self.midlayer.input_layernorm = self.norm = nn.Identity()

    @classmethod
    def beside(cls, target: LlamaForCausalLM) -> Eagle:
        """A head that begins with the weights of the target's last layer."""
        head = cls(target.config)
        begun = Eagle3.of(target, head.layers, head.kept)
        head.midlayer.load_state_dict(begun.midlayer.state_dict(), strict=False)
        head.lm_head.load_state_dict(begun.lm_head.state_dict())
        return head

    def unroll(self, states: torch.Tensor, embedded: torch.Tensor, steps: int) -> list[torch.Tensor]:
        passed, told = Passed(), []
        for step in range(steps):
            count = len(embedded) - step
            where = torch.arange(step, step + count)[None]
            read = self.fc(torch.cat([embedded[step:], states[:count]], -1))
            # The layer's attention reads the state alone: the embedding is in it.
            states = self.midlayer(torch.zeros_like(read), read, self.rotary(read, where), passed)
            told.append(states)
        return told

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Writes into the folder what SGLang takes as --speculative-draft-model-path with EAGLE."""
        hidden = self.config.hidden_size
        weights = {f"fc.{name}": weight for name, weight in self.fc.state_dict().items()}
        for name, weight in self.midlayer.state_dict().items():
            weights[f"layers.0.{name}"] = weight[:, hidden:] if _reads(name) else weight
        file = folder / "model.safetensors"
        save_file({name: weight.to(dtype).contiguous() for name, weight in weights.items()}, file)
        about = self.config.to_dict() | {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
        (folder / "config.json").write_text(json.dumps(about))

    @classmethod
    def read(cls, target: LlamaForCausalLM, weights: dict[str, torch.Tensor]) -> Eagle:
        """The head that `save` has written."""
        head, hidden = cls(target.config), target.config.hidden_size
        state = {"lm_head.weight": target.lm_head.weight}
        for name, weight in weights.items():
            state[name.replace("layers.0", "midlayer")] = pad(weight, (hidden, 0)) if _reads(name) else weight
        head.load_state_dict(state)
        return head


def _reads(name: str) -> bool:
    """Whether the weight is one through which the attention reads: this project's layer reads two inputs, EAGLE's one."""
    return any(part in name for part in ("q_proj", "k_proj", "v_proj"))
