"""The EAGLE-3 head of the demo model, made on first use."""

from __future__ import annotations

import sys
from pathlib import Path

from sglang_patches.demo.corpus import PROMPTS
from sglang_patches.demo.folder import MODEL_NAME, demo_model_dir, made_once
from sglang_patches.demo.model import ensure
from sglang_patches.early_exit.states import Text, as_chat
from sglang_patches.head.training import train_shown

SAMPLES = 6  # answers to each of the demo's questions
TOKENS = 256  # of an answer, at most
EPOCHS = 4


def demo_head() -> Path:
    """The folder of the demo model's head, which is trained on what the model answers to the demo's questions."""

    def make(folder: Path) -> None:
        print("training an EAGLE-3 head of the demo model: half an hour, once", file=sys.stderr, flush=True)
        train_shown(ensure(), list(_answers(ensure())), folder, EPOCHS)

    return made_once(demo_model_dir().with_name(f"{MODEL_NAME}-eagle3"), make)


def _answers(model: Path) -> list[Text]:
    """Answers that the model draws: several to a question differ."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    texts = []
    for question in PROMPTS.read_text().splitlines():
        prompt = as_chat(question, tokenizer)
        drawn = target.generate(
            torch.tensor([prompt] * SAMPLES), do_sample=True, top_k=0, max_new_tokens=TOKENS
        )
        for answer in drawn[:, len(prompt) :].tolist():
            ends = [at for at, token in enumerate(answer) if token == tokenizer.eos_token_id]
            texts.append(Text(prompt, answer[: ends[0] + 1] if ends else answer))
    return texts
