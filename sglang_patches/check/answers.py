"""`python -m sglang_patches.check.answers OUT TOKENS SGLANG-FLAGS...`: one engine's greedy answers, as JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sglang_patches.check.greedy import PROMPTS, ROUNDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("tokens", type=int)
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    import sglang
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()  # some versions of SGLang resolve the arguments at once
    engine = sglang.Engine(server_args=prepare_server_args(given.flags))
    answers = []
    for _ in range(ROUNDS):
        answers += engine.generate(
            list(PROMPTS),
            {"temperature": 0, "max_new_tokens": given.tokens},
            return_logprob=True,
            top_logprobs_num=2,
        )
    dtype = str(engine.tokenizer_manager.model_config.dtype).removeprefix("torch.")
    given.out.write_text(json.dumps(_summary(answers, dtype)))
    engine.shutdown()


def _summary(answers: list[dict], dtype: str) -> dict:
    """tokens: ids of each answer. margins: log-probability of each token over that of the second likeliest one."""
    infos = [answer["meta_info"] for answer in answers]
    decoded = [info["completion_tokens"] - 1 for info in infos]  # the first token is the prefill's
    steps = sum(info.get("spec_verify_ct") or count for info, count in zip(infos, decoded, strict=True))
    return {
        "dtype": dtype,
        "tokens": [answer["output_ids"] for answer in answers],
        "margins": [
            [first[0] - second[0] for first, second in info["output_top_logprobs"]] for info in infos
        ],
        "tokens_per_step": sum(decoded) / max(1, steps),
    }


if __name__ == "__main__":
    main()
