"""The namespace of the text that an instance reads and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from datastore_service.client import tokenizer_fingerprint
from datastore_service.protocol.types import Namespace
from sglang_patches.options import Options
from sglang_patches.tokenizer_file import tokenizer_file

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def namespace_of(server_args: ServerArgs, options: Options) -> Namespace:
    """The same on every instance that serves the model: it holds the folder's name, not its path."""
    model = (server_args.served_model_name or server_args.model_path).rstrip("/").rsplit("/", 1)[-1]
    tokenizer = tokenizer_file(server_args.tokenizer_path or server_args.model_path, server_args.revision)
    return Namespace(model, tokenizer_fingerprint(tokenizer), options.tenant)
