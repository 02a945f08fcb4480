"""Finds a model's `tokenizer.json`: its fingerprint names the datastore's namespace."""

from __future__ import annotations

from pathlib import Path

TOKENIZER = "tokenizer.json"


def tokenizer_file(model: str, revision: str | None = None) -> Path:
    """The tokenizer's file, in the model's folder, or in the hub's cache for a hub name. Raises ValueError that says what is missing."""
    folder = Path(model)
    if folder.is_dir():
        if not (folder / TOKENIZER).is_file():
            raise ValueError(f"no {TOKENIZER} in {model}, which the datastore needs")
        return folder / TOKENIZER
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, TOKENIZER, revision=revision))
    except HFValidationError:
        raise ValueError(f"{model} is neither a folder nor a name that a hub's model can have") from None
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{model} is neither a folder nor a hub model with {TOKENIZER}: {reason}") from error
