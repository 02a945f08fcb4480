"""The namespace of the text that an instance reads and writes, and the tokenizer's file, whose fingerprint names it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from datastore_service.client import tokenizer_fingerprint
from datastore_service.protocol.types import Namespace
from sglang_patches.options import Options

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


TOKENIZER = "tokenizer.json"


def namespace_of(server_args: ServerArgs, options: Options) -> Namespace:
    """The same on every instance that serves the model: it holds the folder's name, not its path."""
    model = (server_args.served_model_name or server_args.model_path).rstrip("/").rsplit("/", 1)[-1]
    tokenizer = tokenizer_file(server_args.tokenizer_path or server_args.model_path, server_args.revision)
    return Namespace(model, tokenizer_fingerprint(tokenizer), options.tenant)


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
