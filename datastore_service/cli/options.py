"""Options that several commands share."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated

import typer

from datastore_service.client import tokenizer_fingerprint
from datastore_service.protocol.types import Namespace
from datastore_service.tls import client_tls

TOKEN_VARIABLE = "SPECSTORE_ADMIN_TOKEN"
ENDPOINT_VARIABLE = "SPECSTORE_ENDPOINT"
FINGERPRINT = re.compile(r"[0-9a-f]{64}")

Endpoint = Annotated[
    str, typer.Option(help="HOST:PORT or unix:PATH of a running service", envvar=ENDPOINT_VARIABLE)
]
Model = Annotated[
    str, typer.Option(help="model part of the namespace: the model folder's name, as SGLang's plugin has it")
]
TokenizerOption = Annotated[str, typer.Option("--tokenizer", help="the model's folder, or a fingerprint")]
Tenant = Annotated[str, typer.Option(help="tenant part of the namespace")]
TokenFile = Annotated[
    Path | None, typer.Option("--admin-token-file", help=f"file with the admin token; else {TOKEN_VARIABLE}")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
DEFAULT_ENDPOINT = "127.0.0.1:50061"

# The variables are those of SGLang's plugin, as is the endpoint's.
_TLS_OPTIONS = {
    "tls_ca": "TLS: certificates (PEM) of who signed the service's",
    "tls_certificate": "certificate (PEM) to show to a service that asks for one",
    "tls_key": "its private key",
}


def namespace_of(model: str, tokenizer: str, tenant: str) -> Namespace:
    """tokenizer: a folder or a fingerprint. Raises StorageError for a folder without tokenizer.json."""
    known = FINGERPRINT.fullmatch(tokenizer)
    return Namespace(model, tokenizer if known else tokenizer_fingerprint(tokenizer), tenant)


def takes_tls(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command, in place of its parameter `tls`, the options that name the files."""

    @wraps(command)
    def run(
        tls_ca: Path | None, tls_certificate: Path | None, tls_key: Path | None, **others: object
    ) -> None:
        command(tls=client_tls(tls_ca, tls_certificate, tls_key), **others)

    signature = inspect.signature(command, eval_str=True)
    others = [option for option in signature.parameters.values() if option.name != "tls"]
    run.__signature__ = signature.replace(parameters=others + _tls_parameters())  # type: ignore[attr-defined]
    return run


def _tls_parameters() -> list[inspect.Parameter]:
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[Path | None, typer.Option(help=meaning, envvar=f"SPECSTORE_{name.upper()}")],
        )
        for name, meaning in _TLS_OPTIONS.items()
    ]
