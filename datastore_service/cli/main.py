"""The `specstore` command."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum, auto
from functools import partial
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from datastore_service.answers.errors import ModelServerError
from datastore_service.cli.admin import (
    compact,
    drop_namespace,
    epoch,
    flush,
    forget,
    health,
    namespaces,
    quota,
    restore,
    sessions,
    snapshot,
    snapshots,
    stats,
    warmup,
)
from datastore_service.cli.backup import backup, backups, restore_backup
from datastore_service.cli.collect import collect
from datastore_service.cli.options import (
    SHARE_PASSWORD_VARIABLE,
    TOKEN_VARIABLE,
    AsJson,
    EncryptionKeys,
    TokenizerArgument,
    TokenizerFolder,
    admin_token,
    expand_groups,
    operator_keys,
    share_address,
)
from datastore_service.cli.output import errors, visible, write_what_the_terminal_lacks_as_escapes
from datastore_service.cli.prior import build_shown
from datastore_service.cli.query import query
from datastore_service.client import DatastoreError, tokenizer_fingerprint
from datastore_service.endpoint import Endpoint, parse_endpoint
from datastore_service.protocol.types import MAX_VOCAB
from datastore_service.server.addresses import check_exposure
from datastore_service.server.credentials import watched_tls
from datastore_service.server.identities import Table
from datastore_service.server.reloading import Reloading
from datastore_service.storage.errors import StorageError


class Fusion(StrEnum):
    """The names of `Policy` on the command line."""

    WEIGHTED = auto()
    PRIORITY = auto()


class LogLevel(StrEnum):
    """The log levels of the service, which writes no debug lines."""

    INFO = auto()
    WARNING = auto()
    ERROR = auto()


Limit = partial(typer.Option, metavar="N", rich_help_panel="Limits")
TlsFile = partial(typer.Option, metavar="FILE", rich_help_panel="TLS")


class OneLineErrors(TyperGroup):
    """Reports errors that a user can cause in one line: status 2 for a bad argument, 1 for other errors."""

    def main(self, *args: Any, **named: Any) -> NoReturn:
        try:
            sys.exit(super().main(*args, **named | {"standalone_mode": False}))
        except typer.TyperException as error:
            _fail(_usage(error), error.exit_code)
        except ValueError as error:
            _fail(error, 2)
        except (StorageError, DatastoreError, ModelServerError) as error:
            _fail(error, 1)
        except OSError as error:
            _fail(_without_errno(error), 1)


class CheckedCommand(TyperCommand):
    """A command that ends at once where the processor lacks what the kernels are compiled for. Its help needs no kernel."""

    def invoke(self, ctx: Any) -> Any:
        from datastore_service.engine.processor import check_processor

        check_processor()
        return super().invoke(ctx)


def _fail(error: object, status: int) -> NoReturn:
    errors.print(f"specstore: {visible(error)}", style="red", markup=False)
    sys.exit(status)


def _usage(error: typer.TyperException) -> str:
    """Typer's words in one line, with where to read more."""
    words = " ".join(error.format_message().split()).removesuffix(".")
    context: typer.Context | None = getattr(error, "ctx", None)
    return f"{words}; see '{context.command_path} --help'" if context else words


def _without_errno(error: OSError) -> str:
    if not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


app = typer.Typer(
    cls=OneLineErrors,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serves drafts from text that a model and its users have written, and looks after that text.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(package_version("specstore"))
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options_of_all_commands(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="print the version", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    write_what_the_terminal_lacks_as_escapes()
    if context.invoked_subcommand is None:
        print(context.get_help())


def build(
    sources: Annotated[
        list[Path],
        typer.Argument(help="JSONL or Parquet (see --field), plain text, or .npy token ids"),
    ],
    out: Annotated[Path, typer.Option(help="directory of the prior; a finished one is appended to")],
    tokenizer: TokenizerFolder,
    field: Annotated[str, typer.Option(help="field of a JSONL line, column of a Parquet file")] = "text",
    ray: Annotated[
        str | None,
        typer.Option(
            help="build on a Ray cluster: HOST:PORT of its head, or `local` for one on this machine"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Builds a prior from a corpus, or adds to one, on this machine or on a Ray cluster. An interrupted build goes on where it
    stopped."""
    built = build_shown(sources, out, tokenizer, field, ray)
    print(json.dumps(built.fields) if as_json else built)


def upgrade(
    directory: Annotated[Path, typer.Argument(help="directory of a prior")],
    as_json: AsJson = False,
) -> None:
    """Rewrites a prior's segment files and manifest of an older format. An interrupted upgrade is simply repeated."""
    from datastore_service.storage.upgrade import upgrade_segments

    rewritten = upgrade_segments(directory, lambda name: errors.print(f"rewrote {name}", markup=False))
    print(json.dumps({"rewritten": rewritten}) if as_json else f"{directory}: {rewritten} segments rewritten")


def serve(
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="HOST:PORT (0: any free port) or unix:PATH")
    ] = "127.0.0.1:50061",
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="permit an address that other machines reach")
    ] = False,
    admin_token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"holds the admin token; else the environment's {TOKEN_VARIABLE}"),
    ] = None,
    identities: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="table (TOML): who may draft, publish, read, administer and forget for which tenants",
        ),
    ] = None,
    audit_log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="lines about admin calls and refusals go there, not to the service's log"
        ),
    ] = None,
    log_level: Annotated[
        LogLevel, typer.Option(help="the least that is logged: info, warning or error")
    ] = LogLevel.INFO,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="the service's directory, made if there is none: keeps the live tiers in DIR/live (without it they are in "
            "memory alone), uses a prior in DIR/prior, and files to warm up from in DIR/corpora",
            rich_help_panel="Data",
        ),
    ] = None,
    encryption_keys: EncryptionKeys = None,
    prior: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="directory of a prior, as `specstore build` makes it", rich_help_panel="Data"
        ),
    ] = None,
    tenant_prior: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TENANT=DIR",
            help="a further prior, which this tenant alone reads; may be repeated",
            rich_help_panel="Data",
        ),
    ] = None,
    priors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="table (TOML): further priors that requests may name, and which tenants' requests",
            rich_help_panel="Data",
        ),
    ] = None,
    share: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="share outputs with other services over a Valkey or Redis server: valkey://USER@HOST:PORT/DATABASE (user and database may be left out), or "
            "valkeys:// for TLS",
            rich_help_panel="Sharing",
        ),
    ] = "",
    share_password_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"holds the password there; else the environment's {SHARE_PASSWORD_VARIABLE}",
            rich_help_panel="Sharing",
        ),
    ] = None,
    share_tls_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="certificates (PEM) of who signed that server's; without it, the system's",
            rich_help_panel="Sharing",
        ),
    ] = None,
    share_tls_certificate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="certificate (PEM) to show to a server that asks for one, then intermediate ones",
            rich_help_panel="Sharing",
        ),
    ] = None,
    share_tls_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="its private key (PEM)", rich_help_panel="Sharing"),
    ] = None,
    fusion: Annotated[
        Fusion,
        typer.Option(
            help="weighted: a tree from all that was found; priority: the text after the longest match",
            rich_help_panel="Data",
        ),
    ] = Fusion.WEIGHTED,
    namespaces: Annotated[
        int,
        Limit(
            help="most namespaces: models, tokenizers and tenants. An empty one takes 0.3 MB; workers of further ones are refused",
            min=1,
            max=4096,
        ),
    ] = 256,
    sessions: Annotated[
        int, Limit(help="most open sessions of a namespace; only their workers draft for further ones")
    ] = 4096,
    tokens: Annotated[
        int,
        Limit(
            help="most tokens of its open sessions and kept conversations, up to 90 bytes each. Beyond that conversations are dropped, then "
            "new text is refused, and only its worker drafts for that session"
        ),
    ] = 1 << 26,
    live_tokens: Annotated[
        int,
        Limit(
            help="most tokens of its live tier, about 6 bytes each. Beyond that the oldest text is dropped; 0: none is kept"
        ),
    ] = 1 << 24,
    workspace_tokens: Annotated[
        int,
        Limit(
            help="most tokens of its workspaces, which requests' prompts enter that name one, up to 120 bytes each. Beyond that the "
            "oldest text is dropped; 0: none is kept"
        ),
    ] = 0,
    refusals: Annotated[
        int,
        Limit(
            help="most refused tokens kept of a session, for its rejected tier; 0: workers do not send them"
        ),
    ] = 0,
    streams: Annotated[
        int,
        Limit(
            help="most connected workers, each of which takes a thread; further ones are refused and try again",
            min=1,
            max=4096,
        ),
    ] = 64,
    grace: Annotated[
        float, Limit(help="seconds a broken stream's sessions wait for their worker", min=0)
    ] = 60.0,
    conversation_seconds: Annotated[
        float, Limit(help="how long a conversation is kept for its next request")
    ] = 3600.0,
    live_max_age: Annotated[
        float | None,
        Limit(
            metavar="SECONDS",
            help="greatest age of a text in the live tier and in workspaces; without it, age counts for nothing",
            min=1,
        ),
    ] = None,
    snapshot_max_age: Annotated[
        float | None,
        Limit(
            metavar="SECONDS",
            help="greatest age of a snapshot; without it, snapshots are kept for ever",
            min=1,
        ),
    ] = None,
    vocab_size: Annotated[
        int, Limit(help="token ids are smaller; a small one saves memory", min=1, max=MAX_VOCAB)
    ] = MAX_VOCAB,
    tls_certificate: Annotated[
        Path | None,
        TlsFile(help="listen with TLS: the service's certificate, then intermediate ones (PEM)"),
    ] = None,
    tls_key: Annotated[Path | None, TlsFile(help="its private key (PEM)")] = None,
    tls_client_ca: Annotated[
        Path | None, TlsFile(help="clients must show a certificate signed by one of these (PEM)")
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="HTTP port: a status page at /, Prometheus at /metrics, probes at /healthz and /readyz, without a token",
            min=0,
            max=65535,
            rich_help_panel="Metrics",
        ),
    ] = None,
    metrics_host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="its IPv4 address; other machines reach it only with --allow-remote",
            rich_help_panel="Metrics",
        ),
    ] = "127.0.0.1",
) -> None:
    """Serves drafts until SIGTERM; logs are JSON lines on standard error."""
    address = parse_endpoint(listen, "listen")
    token = admin_token(admin_token_file)
    check_exposure(address, bool(token or identities), allow_remote)
    _check_metrics_host(metrics_host, allow_remote)
    tls = watched_tls(tls_certificate, tls_key, tls_client_ca)
    table = _table(identities, token)
    shared = share_address(share, share_password_file, share_tls_ca, share_tls_certificate, share_tls_key)
    if encryption_keys and not data:
        raise ValueError("encryption-keys: needs data")

    # After the checks: kernels may be compiled now, which takes a while.
    from datastore_service.engine.fusion import FusionWeights, Policy
    from datastore_service.engine.limits import Limits
    from datastore_service.server.audit import audit_to
    from datastore_service.server.descriptors import raise_limit
    from datastore_service.server.engine_factory import engine_factory
    from datastore_service.server.limits import ServiceLimits
    from datastore_service.server.logs import log_to_stderr
    from datastore_service.server.metrics_export import export_metrics
    from datastore_service.server.prior_file import read_priors
    from datastore_service.server.service import Service
    from datastore_service.server.service import serve as serve_until_told
    from datastore_service.server.tracing import export_spans
    from datastore_service.storage.data_directory import DataDirectory

    log_to_stderr(log_level)
    if audit_log:
        audit_to(audit_log)
    raise_limit()
    export_spans()
    limits = Limits(
        sessions=sessions,
        tokens=tokens,
        live_tokens=live_tokens,
        conversation_seconds=conversation_seconds,
        live_seconds=live_max_age or math.inf,
        refusals=refusals,
        workspace_tokens=workspace_tokens,
    )
    weights = FusionWeights(policy=Policy[fusion.name])
    of_tenants = _tenant_priors(tenant_prior or ())
    named = read_priors(priors) if priors else {}
    maker = engine_factory(_prior_in(data, prior), vocab_size, limits, weights, of_tenants, named)
    directory = DataDirectory(data, vocab_size, operator_keys(encryption_keys)) if data else None
    corpora = data / "corpora" if data else None
    service_limits = ServiceLimits(
        grace=grace,
        streams=streams,
        namespaces=namespaces,
        snapshot_seconds=snapshot_max_age or math.inf,
    )
    most = {"bytes": service_limits.most_bytes(limits), "bytes_of_a_namespace": limits.most_bytes}
    service = Service(
        address, maker, service_limits, token, allow_remote, tls, corpora, directory, table, shared
    )
    export_metrics(service.metrics.registry)
    serve_until_told(service, most, metrics_port, metrics_host)


def _table(identities: Path | None, token: str) -> Reloading[Table] | None:
    if identities is None:
        return None
    from datastore_service.server.identity_file import watched_table

    return watched_table(identities, token)


def _tenant_priors(given: Sequence[str]) -> dict[str, Path]:
    priors: dict[str, Path] = {}
    for value in given:
        tenant, _, directory = value.partition("=")
        if not (tenant and directory):
            raise ValueError(f"tenant-prior: {value!r} is not TENANT=DIR")
        if tenant in priors:
            raise ValueError(f"tenant-prior: {tenant!r} has two; build one of both corpora")
        priors[tenant] = Path(directory)
    return priors


def _check_metrics_host(host: str, allow_remote: bool) -> None:
    if not (allow_remote or Endpoint(host).local):
        raise ValueError(
            f"metrics-host: {host} is reachable from other machines; --allow-remote permits that"
        )


def _prior_in(data: Path | None, given: Path | None) -> Path | None:
    """The prior to attach: the given one, else that of the data directory, which is made if there is none."""
    from datastore_service.storage.data_directory import PRIOR
    from datastore_service.storage.manifest import has_manifest

    if data is not None and not data.is_dir():
        if data.exists():
            raise ValueError(f"data: {data} is not a directory")
        data.mkdir(parents=True)
    return given or (data / PRIOR if data is not None and has_manifest(data / PRIOR) else None)


def fingerprint(
    tokenizer: TokenizerArgument,
) -> None:
    """Prints the tokenizer's fingerprint: the `tokenizer` of a namespace."""
    print(tokenizer_fingerprint(tokenizer))


def version() -> None:
    """Prints the version."""
    _print_version(True)


# In the order in which a newcomer needs them, which is that of --help.
COMMANDS: dict[str, Sequence[Callable[..., None]]] = {
    "Serve": (serve, health),
    "Fill": (build, collect, warmup, upgrade),
    "Look": (query, stats, namespaces, sessions),
    "Bound": (quota,),
    "Keep and forget": (snapshot, snapshots, restore, forget, flush, epoch, compact, drop_namespace),
    "Back up": (backup, backups, restore_backup),
    "Names": (fingerprint, version),
}
for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(cls=CheckedCommand, rich_help_panel=panel)(expand_groups(command))


if __name__ == "__main__":
    app()
