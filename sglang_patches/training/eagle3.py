"""An EAGLE-3 head of one layer, as torch trains it and SGLang reads it.

EAGLE-3 (arXiv 2503.01840): at a position the head gets the embedding of the next token and states of the target from three depths. It
says the token after that. Its own state takes the place of the target's at the tokens that it drafts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import linear
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

ARCHITECTURE = "LlamaForCausalLMEagle3"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def read_layers(depth: int) -> list[int]:
    """Numbers of layers below the states that the head reads, of a target with `depth` layers: near the first, the middle and the last."""
    return sorted({min(max(layer, 0), depth - 1) for layer in (2, depth // 2, depth - 3)})


@dataclass
class Passed:
    """Keys and values of the steps so far, each [heads, positions, head size]."""

    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)


class Layer(nn.Module):
    """A Llama layer whose attention reads two inputs, the embedding and the state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.head = config.head_dim
        queries, keys = config.num_attention_heads * self.head, config.num_key_value_heads * self.head
        sizes = {
            "q_proj": (2 * hidden, queries),
            "k_proj": (2 * hidden, keys),
            "v_proj": (2 * hidden, keys),
            "o_proj": (queries, hidden),
        }
        self.self_attn = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(hidden, eps)
        self.hidden_norm = LlamaRMSNorm(hidden, eps)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps)

    def forward(
        self, embedded: torch.Tensor, state: torch.Tensor, rotary: tuple, passed: Passed
    ) -> torch.Tensor:
        """The states after the layer, [positions, H]. Appends the step's keys and values to `passed`."""
        read = torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], -1)
        query, key, value = (
            self.self_attn[name](read).unflatten(-1, (-1, self.head)).transpose(0, 1)
            for name in _ATTENTION[:3]
        )
        query, key = apply_rotary_pos_emb(query[None], key[None], *rotary)
        share = query.shape[1] // key.shape[1]
        passed.keys.append(key[0].repeat_interleave(share, 0))
        passed.values.append(value.repeat_interleave(share, 0))
        mixed = _attend(query[0], passed).transpose(0, 1).flatten(1)
        state = state + self.self_attn["o_proj"](mixed)
        return state + self.mlp(self.post_attention_layernorm(state))


def _attend(query: torch.Tensor, passed: Passed) -> torch.Tensor:
    """Attention as the head has it while it drafts: the chain that begins behind a position sees the first step up to there, and of the
    later steps its own.

    query: of the last step in `passed`, [heads, positions, head size].
    """
    scale = query.shape[-1] ** -0.5
    (keys, *later), (values, *later_values) = passed.keys, passed.values
    positions = query.shape[1]
    begun = (query @ keys[:, :positions].transpose(1, 2)) * scale
    begun = begun.masked_fill(torch.ones_like(begun, dtype=torch.bool).triu(1), -torch.inf)
    own = [(query * of[:, :positions]).sum(-1, keepdim=True) * scale for of in later]
    shares = torch.cat([begun, *own], -1).softmax(-1)
    mixed = shares[..., :positions] @ values[:, :positions]
    for step, of in enumerate(later_values):
        mixed = mixed + shares[..., positions + step, None] * of[:, :positions]
    return mixed


class Eagle3(nn.Module):
    """The head's weights, by the names that SGLang reads.

    kept: int64 [draft vocabulary], the target's tokens that the head can say, ascending.
    """

    def __init__(self, config: LlamaConfig, layers: Sequence[int], kept: torch.Tensor) -> None:
        super().__init__()
        self.config, self.layers = config, list(layers)
        hidden = config.hidden_size
        self.fc = nn.Linear(hidden * len(layers), hidden, bias=False)
        self.midlayer = Layer(config)
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, len(kept), bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.register_buffer("kept", kept, persistent=False)

    @classmethod
    def of(cls, target, layers: Sequence[int], kept: torch.Tensor) -> Eagle3:
        """A head that begins as the target's last layer, and says what that would. target: a Llama of transformers."""
        head = cls(target.config, layers, kept)
        last, own = target.model.layers[-1], head.midlayer
        hidden = target.config.hidden_size
        with torch.no_grad():
            for name in _ATTENTION[:3]:
                own.self_attn[name].weight[:, :hidden].normal_(0, 0.02)
                own.self_attn[name].weight[:, hidden:] = getattr(last.self_attn, name).weight
            own.self_attn["o_proj"].weight.copy_(last.self_attn.o_proj.weight)
            own.mlp.load_state_dict(last.mlp.state_dict())
            own.post_attention_layernorm.load_state_dict(last.post_attention_layernorm.state_dict())
            own.hidden_norm.load_state_dict(last.input_layernorm.state_dict())
            head.norm.load_state_dict(target.model.norm.state_dict())
            head.fc.weight.zero_()
            head.fc.weight[:, -hidden:] = torch.eye(hidden)  # the deepest of the states
            head.lm_head.weight.copy_(target.get_output_embeddings().weight[kept])
        return head

    def unroll(self, states: torch.Tensor, embedded: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """The head's states when it drafts behind each position, of `steps` steps. Step k reads the token k + 1 places behind its position
        and says the one after that; it has k positions fewer than the first.

        states: [positions, len(layers) * H], the target's.
        embedded: [positions, H], the embedding of the token behind each position.
        """
        passed, told = Passed(), []
        state = self.fc(states)
        for step in range(steps):
            count = len(embedded) - step
            where = torch.arange(step, step + count, device=embedded.device)[None]
            rotary = self.rotary(embedded, where)
            state = self.midlayer(embedded[step:], state[:count], rotary, passed)
            told.append(state)
        return told

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """[positions, draft vocabulary]."""
        return linear(self.norm(state), self.lm_head.weight)

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Writes into the folder what SGLang takes as --speculative-draft-model-path with EAGLE3."""
        vocabulary = self.config.vocab_size
        weights = {name: weight.to(dtype).contiguous() for name, weight in self.state_dict().items()}
        weights["d2t"] = self.kept - torch.arange(len(self.kept), device=self.kept.device)
        weights["t2d"] = torch.isin(torch.arange(vocabulary), self.kept.cpu())
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        config = self.config.to_dict() | {
            "architectures": [ARCHITECTURE],
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
            "draft_vocab_size": len(self.kept),
            "dtype": str(dtype).removeprefix("torch."),
            # SGLang counts from the layer above the state.
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in self.layers]},
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
