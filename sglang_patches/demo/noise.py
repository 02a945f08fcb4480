"""Drafts of any quality: copies of a model whose weights carry noise.

`python -m sglang_patches.demo.noise` measures again what `STRENGTHS` says (minutes on a CPU).
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from .corpus import CORPUS, PROMPTS
from .folder import MODEL_NAME, demo_model_dir, made_once
from .model import ensure
from .variant import write_variant

# By the agreement with the demo model, measured over 20 of its answers with seed 0: .900, .700, .502, .301.
STRENGTHS = {0.9: 0.03, 0.7: 0.092, 0.5: 0.148, 0.3: 0.215}
MEASURED_TEXTS, MEASURED_TOKENS = 20, 128


def noisy_draft(agreement: float) -> Path:
    """A draft for the demo model, made on first use. agreement: a key of `STRENGTHS`, about the share of positions at which its
    likeliest token is the demo model's."""
    strength = STRENGTHS[agreement]
    out = demo_model_dir().with_name(f"{MODEL_NAME}-noise-{strength}")
    return made_once(out, lambda folder: write_noisy_copy(ensure(), folder, strength))


def write_noisy_copy(source: Path, out: Path, strength: float, seed: int = 0) -> None:
    """Writes a model into the empty folder `out`: that of `source`, with Gaussian noise on the matrices of its blocks.

    strength: standard deviation of the noise, relative to each matrix's own. Embeddings, output head and norms stay as they are:
    the copy reads and writes the source's tokens. The same seed gives the same weights.
    """
    write_variant(source, out, lambda weights, config: add_noise(weights, strength, seed))


def add_noise(weights: dict, strength: float, seed: int = 0) -> None:
    """Changes the state dictionary of a Llama in place, as `write_noisy_copy` says."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name in sorted(weights):
        matrix = weights[name]
        if ".layers." in name and matrix.dim() == 2:
            noise = torch.randn(matrix.shape, generator=generator)
            matrix += (strength * matrix.float().std() * noise).to(matrix.dtype)


def agreement(target, draft, texts: Sequence[tuple[list[int], list[int]]]) -> float:
    """Share of positions at which two causal models of transformers have the same likeliest token, given the text so far.

    texts: prompt and answer, token ids. The positions are those of the answers' tokens.
    """
    import torch

    same = []
    with torch.inference_mode():
        for prompt, answer in texts:
            ids = torch.tensor([prompt + answer])
            first, second = (
                model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1) for model in (target, draft)
            )
            same.append(first == second)
    return float(torch.cat(same).float().mean())


def own_texts(count: int, tokens: int) -> list[tuple[list[int], list[int]]]:
    """The first prompts of the demo's corpus as chats, and the demo model's answers, cut to `tokens`; token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ensure())
    texts = []
    for prompt, row in list(zip(PROMPTS.open(), CORPUS.open(), strict=True))[:count]:
        turns = [{"role": "user", "content": prompt.strip()}]
        asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        texts.append((asked, tokenizer(json.loads(row)["text"])["input_ids"][:tokens]))
    return texts


def measure(strengths: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Strength and agreement of noisy copies of the demo model with it."""
    import torch
    from transformers import AutoModelForCausalLM

    texts = own_texts(MEASURED_TEXTS, MEASURED_TOKENS)
    target = AutoModelForCausalLM.from_pretrained(ensure(), dtype=torch.float32).eval()
    for strength in strengths:
        draft = AutoModelForCausalLM.from_pretrained(ensure(), dtype=torch.bfloat16)
        add_noise(draft.state_dict(), strength)
        yield strength, agreement(target, draft.float().eval(), texts)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for strength, found in measure(list(STRENGTHS.values())):
        print(f"{strength:.3f} {found:.3f}", flush=True)
