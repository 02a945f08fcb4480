"""Commands that ask a running service."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import grpc
import typer
from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
from google.protobuf.message import Message  # type: ignore[import-untyped]
from rich.console import Console
from rich.table import Table

from datastore_service.cli.options import (
    DEFAULT_ENDPOINT,
    TOKEN_VARIABLE,
    Endpoint,
    Model,
    Tenant,
    TokenFile,
    TokenizerOption,
    namespace_of,
)
from datastore_service.client.wire import namespace_message
from datastore_service.endpoint import parse_endpoint
from proto_gen.specstore.v1 import admin_pb2 as pb
from proto_gen.specstore.v1.admin_pb2_grpc import AdminStub
from proto_gen.specstore.v1.drafting_pb2 import Namespace

CALL_SECONDS = 30.0
LONG_CALL_SECONDS = 3600.0
HEALTH_SECONDS = 3.0
DOCUMENTS_A_MESSAGE = 64

AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
SnapshotName = Annotated[str, typer.Argument(help="the snapshot's name")]


def add_commands(app: typer.Typer) -> None:
    for command in (
        stats, namespaces, sessions, flush, warmup, compact, drop_namespace, snapshot, snapshots, restore, health,
    ):  # fmt: skip
        app.command()(command)


def stats(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    as_json: AsJson = False,
    admin_token_file: TokenFile = None,
) -> None:
    """Shows what the service holds and how often each tier hits."""
    with _admin(endpoint, admin_token_file) as (stub, metadata):
        reply = stub.Stats(pb.StatsRequest(), timeout=CALL_SECONDS, metadata=metadata)
    if as_json:
        _print_json(reply)
    else:
        _print_tables(reply)


def namespaces(
    endpoint: Endpoint = DEFAULT_ENDPOINT, as_json: AsJson = False, admin_token_file: TokenFile = None
) -> None:
    """Lists the namespaces."""
    with _admin(endpoint, admin_token_file) as (stub, metadata):
        reply = stub.ListNamespaces(pb.ListNamespacesRequest(), timeout=CALL_SECONDS, metadata=metadata)
    if as_json:
        _print_json(reply)
    else:
        _print_rows(
            ("model", "tenant", "tokenizer"), [(n.model, n.tenant, n.tokenizer) for n in reply.namespaces]
        )


def sessions(
    model: Model,
    tokenizer: TokenizerOption,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    tenant: Tenant = "",
    as_json: AsJson = False,
    admin_token_file: TokenFile = None,
) -> None:
    """Lists a namespace's open sessions, oldest first."""
    request = pb.ListSessionsRequest(namespace=namespace_message(namespace_of(model, tokenizer, tenant)))
    with _admin(endpoint, admin_token_file) as (stub, metadata):
        reply = stub.ListSessions(request, timeout=CALL_SECONDS, metadata=metadata)
    if as_json:
        _print_json(reply)
    else:
        _print_rows(
            ("session", "tokens", "prompt", "bytes", "conversation", "published"),
            [
                (
                    s.session,
                    f"{s.tokens:,}",
                    f"{s.prompt_tokens:,}",
                    f"{s.bytes:,}",
                    s.conversation,
                    s.publish,
                )
                for s in reply.sessions
            ],
        )


def compact(
    model: Model,
    tokenizer: TokenizerOption,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    tenant: Tenant = "",
    admin_token_file: TokenFile = None,
) -> None:
    """Merges a namespace's live tier into as few segments as possible."""
    request = pb.CompactRequest(namespace=namespace_message(namespace_of(model, tokenizer, tenant)))
    with _admin(endpoint, admin_token_file) as (stub, metadata):
        reply = stub.Compact(request, timeout=LONG_CALL_SECONDS, metadata=metadata)
    print(f"live tier: {reply.tokens} tokens in {reply.segments} segments")


def drop_namespace(
    model: Model,
    tokenizer: TokenizerOption,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    tenant: Tenant = "",
    admin_token_file: TokenFile = None,
) -> None:
    """Ends a namespace without open sessions and forgets all of its text."""
    request = pb.DropNamespaceRequest(namespace=namespace_message(namespace_of(model, tokenizer, tenant)))
    with _admin(endpoint, admin_token_file) as (stub, metadata):
        stub.DropNamespace(request, timeout=CALL_SECONDS, metadata=metadata)
    print("dropped")


def snapshot(
    name: SnapshotName,
    model: Model,
    tokenizer: TokenizerOption,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    tenant: Tenant = "",
    admin_token_file: TokenFile = None,
) -> None:
    """Keeps a namespace's live tier under a name, in the service's data directory."""
    namespace = namespace_message(namespace_of(model, tokenizer, tenant))
    request = pb.SnapshotRequest(namespace=namespace, name=name)
    with _admin(endpoint, admin_token_file) as (stub, metadata):
        reply = stub.Snapshot(request, timeout=LONG_CALL_SECONDS, metadata=metadata)
    print(f"snapshot {name}: {reply.tokens} tokens in {reply.segments} segments")


def snapshots(
    model: Model,
    tokenizer: TokenizerOption,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    tenant: Tenant = "",
    as_json: AsJson = False,
    admin_token_file: TokenFile = None,
) -> None:
    """Lists a namespace's snapshots, oldest first."""
    request = pb.ListSnapshotsRequest(namespace=namespace_message(namespace_of(model, tokenizer, tenant)))
    with _admin(endpoint, admin_token_file) as (stub, metadata):
        reply = stub.ListSnapshots(request, timeout=CALL_SECONDS, metadata=metadata)
    if as_json:
        _print_json(reply)
    else:
        _print_rows(
            ("snapshot", "tokens", "bytes", "made (UTC)"),
            [(s.name, f"{s.tokens:,}", f"{s.bytes:,}", _utc(s.created_seconds)) for s in reply.snapshots],
        )


def restore(
    name: SnapshotName,
    model: Model,
    tokenizer: TokenizerOption,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    tenant: Tenant = "",
    admin_token_file: TokenFile = None,
) -> None:
    """Replaces a namespace's live tier by a snapshot of it."""
    namespace = namespace_message(namespace_of(model, tokenizer, tenant))
    request = pb.RestoreRequest(namespace=namespace, name=name)
    with _admin(endpoint, admin_token_file) as (stub, metadata):
        reply = stub.Restore(request, timeout=LONG_CALL_SECONDS, metadata=metadata)
    print(f"live tier: {reply.tokens} tokens in {reply.segments} segments")


def flush(
    model: Model,
    tokenizer: TokenizerOption,
    tier: Annotated[str, typer.Option(help="live, session or rejected")] = "",
    session: Annotated[str, typer.Option(help="one session's name")] = "",
    everything: Annotated[bool, typer.Option("--all", help="every tier but the prior")] = False,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    tenant: Tenant = "",
    admin_token_file: TokenFile = None,
) -> None:
    """Makes the service forget a tier, a session, or all of a namespace."""
    if bool(tier) + bool(session) + everything != 1:
        raise ValueError("flush: one of --tier, --session and --all is required")
    namespace = namespace_message(namespace_of(model, tokenizer, tenant))
    request = pb.FlushRequest(namespace=namespace)
    if tier:
        request.tier = _tier_number(tier)
    elif session:
        request.session = session
    else:
        request.all = True
    with _admin(endpoint, admin_token_file) as (stub, metadata):
        stub.Flush(request, timeout=CALL_SECONDS, metadata=metadata)
    print(f"flushed {tier or session or 'all'}")


def warmup(
    sources: Annotated[
        list[Path], typer.Argument(help="JSONL or Parquet (see --field), plain text, or .npy token ids")
    ],
    model: Model,
    tokenizer: Annotated[Path, typer.Option(help="the model's folder")],
    field: Annotated[str, typer.Option(help="field of a JSONL line, column of a Parquet file")] = "text",
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    tenant: Tenant = "",
    admin_token_file: TokenFile = None,
) -> None:
    """Adds documents to the live tier of a running service."""
    namespace = namespace_message(namespace_of(model, str(tokenizer), tenant))
    documents = _documents(sources, tokenizer, field)
    with _admin(endpoint, admin_token_file) as (stub, metadata):
        reply = stub.Warmup(_requests(namespace, documents), timeout=LONG_CALL_SECONDS, metadata=metadata)
    print(f"added {reply.documents} documents, {reply.tokens} tokens")


def health(endpoint: Endpoint = DEFAULT_ENDPOINT) -> None:
    """Exits with status 0 if the service is serving, 1 if not."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(parse_endpoint(endpoint).target) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=HEALTH_SECONDS
        )
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        raise typer.Exit(1)


@contextmanager
def _admin(endpoint: str, token_file: Path | None) -> Iterator[tuple[AdminStub, tuple[tuple[str, str], ...]]]:
    token = token_file.read_text().strip() if token_file else os.environ.get(TOKEN_VARIABLE, "")
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(parse_endpoint(endpoint).target) as channel:
        yield AdminStub(channel), metadata


def _tier_number(name: str) -> pb.Tier:
    try:
        return pb.Tier.Value(f"TIER_{name.upper()}")
    except ValueError:
        raise ValueError(f"tier: {name!r} is not live, session or rejected") from None


def _documents(sources: list[Path], tokenizer: Path, field: str) -> list[pb.Document]:
    """All of them, so that a bad file is found before anything is sent."""
    from tokenizers import Tokenizer

    from datastore_service.storage.corpus import read_documents, tokenize
    from datastore_service.storage.fingerprint import tokenizer_path

    encoder = Tokenizer.from_file(str(tokenizer_path(tokenizer)))
    texts = (tokens for source in sources for tokens in tokenize(read_documents(source, field), encoder))
    return [pb.Document(tokens=tokens.tolist()) for tokens in texts]


def _requests(namespace: Namespace, documents: list[pb.Document]) -> Iterator[pb.WarmupRequest]:
    yield pb.WarmupRequest(namespace=namespace)
    for first in range(0, len(documents), DOCUMENTS_A_MESSAGE):
        yield pb.WarmupRequest(documents=documents[first : first + DOCUMENTS_A_MESSAGE])


def _utc(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")


def _print_json(reply: Message) -> None:
    fields = MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    print(json.dumps(fields, indent=2))


def _print_rows(headings: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> None:
    table = Table(*headings)
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table)


def _print_tables(reply: pb.StatsReply) -> None:
    console = Console()
    console.print(f"version {reply.version}, up {reply.uptime_seconds:.0f} s, {reply.streams} streams")
    for stats_of in reply.namespaces:
        console.print(_table(stats_of))


def _table(stats_of: pb.NamespaceStats) -> Table:
    namespace = stats_of.namespace
    title = f"{namespace.model} {namespace.tenant} (tokenizer {namespace.tokenizer[:12]})"
    caption = (
        f"{stats_of.sessions} sessions, {stats_of.conversations} conversations, {stats_of.drafts} drafts"
    )
    if stats_of.merge_failures:
        caption += f", {stats_of.merge_failures} failed merges (see the log)"
    if stats_of.log_failures:
        caption += f", {stats_of.log_failures} times the disk refused (see the log)"
    if not stats_of.stored:
        caption += ", live tier in memory alone"
    table = Table(title=title, caption=caption + (", with prior" if stats_of.prior else ", no prior"))
    for column in ("tier", "tokens", "bytes", "segments", "hits", "drafted"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for tier in stats_of.tiers:
        name = pb.Tier.Name(tier.tier).removeprefix("TIER_").lower()
        counts = (tier.tokens, tier.bytes, tier.segments, tier.hits, tier.drafted)
        table.add_row(name, *(f"{count:,}" for count in counts))
    return table
