"""The text of the demo's prior: the demo model's own greedy answers to `prompts.txt`.

`corpus.jsonl` ships with the package; `python -m sglang_patches.demo.corpus` writes it again (minutes on a CPU).
"""

import argparse
import json
from pathlib import Path

from .model import ensure

PROMPTS = Path(__file__).with_name("prompts.txt")
CORPUS = Path(__file__).with_name("corpus.jsonl")
ANSWER_TOKENS = 320
BATCH = 15


def answers(prompts: list[str], folder: Path) -> list[str]:
    """Greedy answers of the model in `folder`, at most `ANSWER_TOKENS` tokens each, without the chat template's frame."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    return tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def write(path: Path = CORPUS) -> None:
    """One JSON object a line: `text`, an answer."""
    prompts = PROMPTS.read_text().splitlines()
    folder = ensure()
    with path.open("w") as file:
        for first in range(0, len(prompts), BATCH):
            for text in answers(prompts[first : first + BATCH], folder):
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    write()
