"""`python docs/worked_example.py`: one decode step with real tokens, which docs/architecture.md explains line by line.

The tokenizer and the target are the demo model's, the datastore is the embedded engine, the arrays are the worker's. Only
the target's forward is made by transformers in place of SGLang: in float32, over the whole text, without a KV cache.
"""

import argparse

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from datastore_service.client import open_datastore, tokenizer_fingerprint
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening
from sglang_patches.demo.model import ensure
from sglang_patches.verification.layout import TreeLayout, lay_out, pack

PROMPT = "Roses are red, violets are blue. Roses are"
NODES = 6


def verify(model, context: list[int], layout: TreeLayout) -> list[int]:
    """The target's greedy token at each row, from one forward over the context and the tree."""
    cached = len(context) - 1  # the context's last token is the root, row 0
    ids = np.concatenate([context[:cached], layout.tokens])
    positions = np.concatenate([np.arange(cached), layout.positions])
    visible = np.tril(np.ones((len(ids), len(ids)), bool))
    visible[cached:, cached:] = layout.mask[0]
    with torch.inference_mode():
        logits = model(
            torch.from_numpy(ids)[None],
            position_ids=torch.from_numpy(positions)[None],
            attention_mask=torch.from_numpy(visible)[None, None],
        ).logits
    return logits[0, cached:].argmax(-1).tolist()


def walk(layout: TreeLayout, target: list[int]) -> list[int]:
    """The accepted rows: from the root to a child for as long as one carries the target's token."""
    path, child = [0], layout.next_token[0, 0]
    while child >= 0:
        if layout.tokens[child] == target[path[-1]]:
            path.append(int(child))
            child = layout.next_token[0, child]
        else:
            child = layout.next_sibling[0, child]
    return path


def main() -> None:
    folder = ensure()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    name = Namespace("demo", tokenizer_fingerprint(folder / "tokenizer.json"))
    datastore = open_datastore("embedded", name, vocab_size=len(tokenizer))

    context = tokenizer(PROMPT)["input_ids"]
    print("context:", *context)
    opening = Opening(prompt_length=len(context))
    entry = Entry("request-1", 0, np.array(context, np.int32), budget=Budget(NODES), opening=opening)
    tree = datastore.step([entry], deadline=1.0)[0].tree
    for node in range(len(tree)):
        text = repr(tokenizer.decode([tree.tokens[node]]))
        print(f"node {node}: token {tree.tokens[node]:>4} {text:7} parent {tree.parents[node]:>2}", end=" ")
        print(f"estimate {tree.probs[node]:.2f} tier {tree.sources[node]}")

    layout = lay_out(pack([tree], NODES + 1), np.array(context[-1:]), np.array([len(context) - 1]))
    target = verify(model, context, layout)
    for row, (token, position) in enumerate(zip(layout.tokens, layout.positions, strict=True)):
        mask = "".join(".x"[int(seen)] for seen in layout.mask[0, row])
        print(f"row {row}: token {token:>4} position {position} sees {mask} target says {target[row]:>4}")

    path = walk(layout, target)
    emitted = [target[row] for row in path]
    print("accepted rows:", *path[1:])
    print("emitted:", *emitted, repr(tokenizer.decode(emitted)))
    ids = torch.tensor([context])
    plain = model.generate(ids, max_new_tokens=len(emitted), do_sample=False, attention_mask=ids * 0 + 1)
    print("plain decoding:", *plain[0, len(context) :].tolist())

    entry = Entry("request-1", len(context), np.array(emitted, np.int32), budget=Budget(NODES))
    tree = datastore.step([entry], deadline=1.0)[0].tree
    print("next tree:", *tree.tokens, repr(tokenizer.decode(tree.tokens)))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
