"""Options that several commands share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from datastore_service.client import tokenizer_fingerprint
from datastore_service.engine.types import Namespace

TOKEN_VARIABLE = "SPECSTORE_ADMIN_TOKEN"
FINGERPRINT = re.compile(r"[0-9a-f]{64}")

Endpoint = Annotated[str, typer.Option(help="HOST:PORT or unix:PATH of a running service")]
Model = Annotated[
    str, typer.Option(help="model part of the namespace: the model folder's name, as SGLang's plugin has it")
]
TokenizerOption = Annotated[str, typer.Option("--tokenizer", help="the model's folder, or a fingerprint")]
Tenant = Annotated[str, typer.Option(help="tenant part of the namespace")]
TokenFile = Annotated[
    Path | None, typer.Option("--admin-token-file", help=f"file with the admin token; else {TOKEN_VARIABLE}")
]
DEFAULT_ENDPOINT = "127.0.0.1:50061"


def namespace_of(model: str, tokenizer: str, tenant: str) -> Namespace:
    """tokenizer: a folder or a fingerprint. Raises StorageError for a folder without tokenizer.json."""
    known = FINGERPRINT.fullmatch(tokenizer)
    return Namespace(model, tokenizer if known else tokenizer_fingerprint(tokenizer), tenant)
