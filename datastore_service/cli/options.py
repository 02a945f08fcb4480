"""Options that several commands share.

A group of options is a dataclass: a command has one parameter of that type, and `expand_groups` gives typer the options
that are its fields.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard, get_type_hints

import typer

from datastore_service.client import tokenizer_fingerprint
from datastore_service.client.access import checked_token, read_token
from datastore_service.protocol.types import Namespace
from datastore_service.storage.fingerprint import TOKENIZER_FILE, tokenizer_path
from datastore_service.tls import Tls, client_tls

if TYPE_CHECKING:
    from datastore_service.server.sharing.address import ShareAddress
    from datastore_service.storage.encryption_keys import OperatorKeys

TOKEN_VARIABLE = "SPECSTORE_ADMIN_TOKEN"
SHARE_PASSWORD_VARIABLE = "SPECSTORE_SHARE_PASSWORD"
ENDPOINT_VARIABLE = "SPECSTORE_ENDPOINT"
FINGERPRINT = re.compile(r"[0-9a-f]{64}")


def _folder_or_fingerprint(tokenizer: str) -> str:
    """ "" for an option that is not given."""
    if tokenizer and not FINGERPRINT.fullmatch(tokenizer):
        _check_tokenizer(tokenizer, "a fingerprint (64 hex digits)")
    return tokenizer


def _folder_or_file(tokenizer: Path) -> Path:
    _check_tokenizer(tokenizer, "that file")
    return tokenizer


def _check_tokenizer(folder: Path | str, otherwise: str) -> None:
    if not tokenizer_path(folder).is_file():
        raise ValueError(f"tokenizer: {folder} is neither a folder with {TOKENIZER_FILE} nor {otherwise}")


OfService = partial(typer.Option, rich_help_panel="Service")  # an option that says how the service is asked
Endpoint = Annotated[
    str,
    OfService(
        metavar="ADDRESS", help="HOST:PORT or unix:PATH of a running service", envvar=ENDPOINT_VARIABLE
    ),
]
Model = Annotated[
    str, typer.Option(help="model part of the namespace: the model folder's name, as SGLang's plugin has it")
]
Tenant = Annotated[str, typer.Option(help="tenant part of the namespace")]
TokenFile = Annotated[
    Path | None,
    OfService(
        metavar="FILE",
        help=f"holds the token or the JWT to show; else {TOKEN_VARIABLE}",
        envvar="SPECSTORE_TOKEN_FILE",
    ),
]
EncryptionKeys = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="keys that encrypt the texts in a data directory: a name and 32 bytes in base64 per line, the one that encrypts first",
        rich_help_panel="Data",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
TlsAuthority = Annotated[
    Path | None,
    OfService(
        metavar="FILE",
        help="TLS: certificates (PEM) of who signed the service's",
        envvar="SPECSTORE_TLS_CA",
    ),
]
TlsCertificate = Annotated[
    Path | None,
    OfService(
        metavar="FILE",
        help="certificate (PEM) to show to a service that asks for one",
        envvar="SPECSTORE_TLS_CERTIFICATE",
    ),
]
TlsKey = Annotated[Path | None, OfService(metavar="FILE", help="its private key", envvar="SPECSTORE_TLS_KEY")]
TokenizerOption = Annotated[
    str,
    typer.Option("--tokenizer", help="the model's folder, or a fingerprint", callback=_folder_or_fingerprint),
]
TokenizerFolder = Annotated[
    Path,
    typer.Option("--tokenizer", help="the model's folder, for its tokenizer.json", callback=_folder_or_file),
]
TokenizerArgument = Annotated[
    Path, typer.Argument(help="the model's folder, or its tokenizer.json", callback=_folder_or_file)
]
DEFAULT_ENDPOINT = "127.0.0.1:50061"


@dataclass
class TlsOptions:
    """TLS files, read before the command runs. Their variables are those of SGLang's plugin, as is the endpoint's.

    files: None if no option is given. Raises ValueError naming the option of a file that cannot be used."""

    tls_ca: TlsAuthority = None
    tls_certificate: TlsCertificate = None
    tls_key: TlsKey = None
    files: Tls | None = field(init=False)

    def __post_init__(self) -> None:
        self.files = client_tls(self.tls_ca, self.tls_certificate, self.tls_key)


@dataclass
class TokenOptions:
    """The token that a command shows. The file's variable is that of SGLang's plugin."""

    token_file: TokenFile = None

    def token(self) -> str:
        """The token in the file, else in the environment, "" for none. Raises OSError, and ValueError naming the source."""
        return read_token(self.token_file) if self.token_file else token_of_environment()

    @property
    def source(self) -> str:
        """The option or the variable that the token is from, if there is one."""
        return f"--token-file {self.token_file}" if self.token_file else TOKEN_VARIABLE


@dataclass
class NamespaceOptions:
    """Which namespace a command is about."""

    model: Model
    tokenizer: TokenizerOption
    tenant: Tenant = ""

    def namespace(self) -> Namespace:
        """Raises StorageError for a tokenizer folder without tokenizer.json."""
        return namespace_of(self.model, self.tokenizer, self.tenant)


@dataclass(kw_only=True)
class ServiceOptions:
    """The service that an admin command calls, and how the command prints the reply."""

    endpoint: Endpoint = DEFAULT_ENDPOINT
    as_json: AsJson = False
    shown: TokenOptions
    tls: TlsOptions


def token_of_environment() -> str:
    """The token in the environment, "" for none. Raises ValueError for a blank one and for one that no header can carry."""
    text = os.environ.get(TOKEN_VARIABLE, "")
    return checked_token(text, TOKEN_VARIABLE) if text else ""


def admin_token(file: Path | None) -> str:
    """The service's: in the file, else in the environment, "" for none. Raises as `TokenOptions.token` does."""
    if not file:
        return token_of_environment()
    return checked_token(file.read_text(errors="replace"), f"admin-token-file: {file}")


def share_address(
    url: str, password_file: Path | None, ca: Path | None, certificate: Path | None, key: Path | None
) -> ShareAddress | None:
    """The server over which services share; None without a URL. Raises OSError, and ValueError naming the option."""
    if not url:
        files = {"password-file": password_file, "tls-ca": ca, "tls-certificate": certificate, "tls-key": key}
        if given := [name for name, path in files.items() if path]:
            raise ValueError(f"share-{given[0]}: needs share")
        return None
    try:
        from datastore_service.server.sharing.address import ShareFiles, parse_share
    except ImportError as error:
        raise ValueError(f"share: {error}; pip install 'specstore[share]'") from None
    if password_file:
        password = checked_token(
            password_file.read_text(errors="replace"), f"share-password-file: {password_file}"
        )
    else:
        password = os.environ.get(SHARE_PASSWORD_VARIABLE, "")
    return parse_share(url, password, ShareFiles(ca, certificate, key))


def operator_keys(file: Path | None) -> OperatorKeys:
    """The keys that encrypt texts, none without a file. Raises OSError, ValueError naming the line at fault."""
    from datastore_service.storage.encryption_keys import NO_KEYS, read_keys

    return read_keys(file) if file else NO_KEYS


def namespace_of(model: str, tokenizer: str, tenant: str) -> Namespace:
    """The namespace of a model, a tokenizer and a tenant. Raises StorageError for a folder without tokenizer.json.

    tokenizer: a folder or a fingerprint."""
    known = FINGERPRINT.fullmatch(tokenizer)
    return Namespace(model, tokenizer if known else tokenizer_fingerprint(tokenizer), tenant)


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command, in place of each parameter whose type is a group, the group's options."""
    signature = inspect.signature(command, eval_str=True)
    groups = {name: p.annotation for name, p in signature.parameters.items() if _is_group(p.annotation)}

    @wraps(command)
    def run(**given: Any) -> None:
        built = {name: _build(group, given) for name, group in groups.items()}
        command(**given, **built)

    options: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        options += _options(groups[name]) if name in groups else [parameter.replace(kind=_KEYWORD)]
    run.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    return run


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _is_group(kind: object) -> TypeGuard[type]:
    return isinstance(kind, type) and is_dataclass(kind)


def _members(group: type) -> list[tuple[Field, Any]]:
    """The fields to fill, each with its type."""
    types = get_type_hints(group, include_extras=True)
    return [(member, types[member.name]) for member in fields(group) if member.init]


def _options(group: type) -> list[inspect.Parameter]:
    options: list[inspect.Parameter] = []
    for member, kind in _members(group):
        if _is_group(kind):
            options += _options(kind)
        else:
            default = inspect.Parameter.empty if member.default is MISSING else member.default
            options.append(inspect.Parameter(member.name, _KEYWORD, default=default, annotation=kind))
    return options


def _build(group: type, given: dict[str, Any]) -> Any:
    """Makes a group of its options, which it removes from `given`."""
    values = {
        member.name: _build(kind, given) if _is_group(kind) else given.pop(member.name)
        for member, kind in _members(group)
    }
    return group(**values)
