"""Commands that ask a running service."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from rich.table import Table

from datastore_service.cli.options import (
    DEFAULT_ENDPOINT,
    FINGERPRINT,
    TOKEN_VARIABLE,
    AsJson,
    Endpoint,
    Model,
    Tenant,
    TokenFile,
    TokenizerOption,
    namespace_of,
    takes_tls,
)
from datastore_service.cli.output import print_json, print_reply, print_rows, progress, tables
from datastore_service.client.channel import open_channel
from datastore_service.client.wire import namespace_message
from datastore_service.tls import Tls
from proto_gen.specstore.v1 import admin_pb2 as pb
from proto_gen.specstore.v1.admin_pb2_grpc import AdminStub
from proto_gen.specstore.v1.drafting_pb2 import Namespace

CALL_SECONDS = 30.0
LONG_CALL_SECONDS = 3600.0
HEALTH_SECONDS = 3.0
DOCUMENTS_A_MESSAGE = 64

SnapshotName = Annotated[str, typer.Argument(help="the snapshot's name")]


def add_commands(app: typer.Typer) -> None:
    for command in (
        stats, namespaces, sessions, flush, warmup, compact, drop_namespace, snapshot, snapshots, restore, health,
    ):  # fmt: skip
        app.command()(takes_tls(command))


def stats(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    as_json: AsJson = False,
    admin_token_file: TokenFile = None,
    *,
    tls: Tls | None,
) -> None:
    """Shows what the service holds and how often each tier hits."""
    with _admin(endpoint, admin_token_file, tls) as (stub, metadata):
        reply = stub.Stats(pb.StatsRequest(), timeout=CALL_SECONDS, metadata=metadata)
    if as_json:
        print_json(reply)
    else:
        _print_tables(reply)


def namespaces(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    as_json: AsJson = False,
    admin_token_file: TokenFile = None,
    *,
    tls: Tls | None,
) -> None:
    """Lists the namespaces."""
    with _admin(endpoint, admin_token_file, tls) as (stub, metadata):
        reply = stub.ListNamespaces(pb.ListNamespacesRequest(), timeout=CALL_SECONDS, metadata=metadata)
    if as_json:
        print_json(reply)
    else:
        print_rows(
            ("model", "tenant", "tokenizer"), [(n.model, n.tenant, n.tokenizer) for n in reply.namespaces]
        )


def sessions(
    model: Model,
    tokenizer: TokenizerOption,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    tenant: Tenant = "",
    as_json: AsJson = False,
    admin_token_file: TokenFile = None,
    *,
    tls: Tls | None,
) -> None:
    """Lists a namespace's open sessions, oldest first."""
    request = pb.ListSessionsRequest(namespace=namespace_message(namespace_of(model, tokenizer, tenant)))
    with _admin(endpoint, admin_token_file, tls) as (stub, metadata):
        reply = stub.ListSessions(request, timeout=CALL_SECONDS, metadata=metadata)
    if as_json:
        print_json(reply)
    else:
        print_rows(
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
    as_json: AsJson = False,
    admin_token_file: TokenFile = None,
    *,
    tls: Tls | None,
) -> None:
    """Merges a namespace's live tier into as few segments as possible."""
    request = pb.CompactRequest(namespace=namespace_message(namespace_of(model, tokenizer, tenant)))
    with _admin(endpoint, admin_token_file, tls) as (stub, metadata):
        reply = stub.Compact(request, timeout=LONG_CALL_SECONDS, metadata=metadata)
    print_reply(reply, as_json, f"live tier: {reply.tokens} tokens in {reply.segments} segments")


def drop_namespace(
    model: Model,
    tokenizer: TokenizerOption,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    tenant: Tenant = "",
    as_json: AsJson = False,
    admin_token_file: TokenFile = None,
    *,
    tls: Tls | None,
) -> None:
    """Ends a namespace without open sessions and forgets all of its text."""
    request = pb.DropNamespaceRequest(namespace=namespace_message(namespace_of(model, tokenizer, tenant)))
    with _admin(endpoint, admin_token_file, tls) as (stub, metadata):
        reply = stub.DropNamespace(request, timeout=CALL_SECONDS, metadata=metadata)
    print_reply(reply, as_json, "dropped")


def snapshot(
    name: SnapshotName,
    model: Model,
    tokenizer: TokenizerOption,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    tenant: Tenant = "",
    as_json: AsJson = False,
    admin_token_file: TokenFile = None,
    *,
    tls: Tls | None,
) -> None:
    """Keeps a namespace's live tier under a name, in the service's data directory."""
    namespace = namespace_message(namespace_of(model, tokenizer, tenant))
    request = pb.SnapshotRequest(namespace=namespace, name=name)
    with _admin(endpoint, admin_token_file, tls) as (stub, metadata):
        reply = stub.Snapshot(request, timeout=LONG_CALL_SECONDS, metadata=metadata)
    print_reply(reply, as_json, f"snapshot {name}: {reply.tokens} tokens in {reply.segments} segments")


def snapshots(
    model: Model,
    tokenizer: TokenizerOption,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    tenant: Tenant = "",
    as_json: AsJson = False,
    admin_token_file: TokenFile = None,
    *,
    tls: Tls | None,
) -> None:
    """Lists a namespace's snapshots, oldest first."""
    request = pb.ListSnapshotsRequest(namespace=namespace_message(namespace_of(model, tokenizer, tenant)))
    with _admin(endpoint, admin_token_file, tls) as (stub, metadata):
        reply = stub.ListSnapshots(request, timeout=CALL_SECONDS, metadata=metadata)
    if as_json:
        print_json(reply)
    else:
        print_rows(
            ("snapshot", "tokens", "bytes", "made (UTC)"),
            [(s.name, f"{s.tokens:,}", f"{s.bytes:,}", _utc(s.created_seconds)) for s in reply.snapshots],
        )


def restore(
    name: SnapshotName,
    model: Model,
    tokenizer: TokenizerOption,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    tenant: Tenant = "",
    as_json: AsJson = False,
    admin_token_file: TokenFile = None,
    *,
    tls: Tls | None,
) -> None:
    """Replaces a namespace's live tier by a snapshot of it."""
    namespace = namespace_message(namespace_of(model, tokenizer, tenant))
    request = pb.RestoreRequest(namespace=namespace, name=name)
    with _admin(endpoint, admin_token_file, tls) as (stub, metadata):
        reply = stub.Restore(request, timeout=LONG_CALL_SECONDS, metadata=metadata)
    print_reply(reply, as_json, f"live tier: {reply.tokens} tokens in {reply.segments} segments")


def flush(
    model: Model,
    tokenizer: TokenizerOption,
    tier: Annotated[str, typer.Option(help="live, session or rejected")] = "",
    session: Annotated[str, typer.Option(help="one session's name")] = "",
    everything: Annotated[bool, typer.Option("--all", help="every tier but the prior")] = False,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    tenant: Tenant = "",
    as_json: AsJson = False,
    admin_token_file: TokenFile = None,
    *,
    tls: Tls | None,
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
    with _admin(endpoint, admin_token_file, tls) as (stub, metadata):
        reply = stub.Flush(request, timeout=CALL_SECONDS, metadata=metadata)
    print_reply(reply, as_json, f"flushed {tier or session or 'all'}")


def warmup(
    model: Model,
    tokenizer: TokenizerOption,
    sources: Annotated[
        list[Path] | None,
        typer.Argument(help="JSONL or Parquet (see --field), plain text, or .npy token ids"),
    ] = None,
    server_file: Annotated[
        str, typer.Option(help="instead of SOURCES: a file in DATA/corpora of the service, which reads it")
    ] = "",
    server_tokenizer: Annotated[
        str, typer.Option(help="its tokenizer.json there, or a folder with one; not needed for token ids")
    ] = "",
    field: Annotated[str, typer.Option(help="field of a JSONL line, column of a Parquet file")] = "text",
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    tenant: Tenant = "",
    as_json: AsJson = False,
    admin_token_file: TokenFile = None,
    *,
    tls: Tls | None,
) -> None:
    """Adds documents to the live tier of a running service."""
    if bool(sources) == bool(server_file):
        raise ValueError("warmup: either SOURCES or --server-file is required")
    namespace = namespace_message(namespace_of(model, tokenizer, tenant))
    if sources:
        documents = _documents(sources, tokenizer, field)
    with _admin(endpoint, admin_token_file, tls) as (stub, metadata):
        if sources:
            with progress(BarColumn(), MofNCompleteColumn()) as bar:
                requests = _requests(namespace, documents, bar)
                reply = stub.Warmup(requests, timeout=LONG_CALL_SECONDS, metadata=metadata)
        else:
            request = pb.WarmupFileRequest(
                namespace=namespace, file=server_file, field=field, tokenizer=server_tokenizer
            )
            reply = _last(stub.WarmupFile(request, timeout=LONG_CALL_SECONDS, metadata=metadata))
    print_reply(reply, as_json, f"added {reply.documents} documents, {reply.tokens} tokens")


def health(endpoint: Endpoint = DEFAULT_ENDPOINT, as_json: AsJson = False, *, tls: Tls | None) -> None:
    """Exits with status 0 if the service is serving, 1 if not."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with open_channel(endpoint, tls) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=HEALTH_SECONDS
        )
    print_reply(reply, as_json, health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        raise typer.Exit(1)


@contextmanager
def _admin(
    endpoint: str, token_file: Path | None, tls: Tls | None
) -> Iterator[tuple[AdminStub, tuple[tuple[str, str], ...]]]:
    token = token_file.read_text().strip() if token_file else os.environ.get(TOKEN_VARIABLE, "")
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with open_channel(endpoint, tls) as channel:
        yield AdminStub(channel), metadata


def _tier_number(name: str) -> pb.Tier:
    try:
        return pb.Tier.Value(f"TIER_{name.upper()}")
    except ValueError:
        raise ValueError(f"tier: {name!r} is not live, session or rejected") from None


def _documents(sources: list[Path], tokenizer: str, field: str) -> list[pb.Document]:
    """All of them, so that a bad file is found before anything is sent. tokenizer: a folder, or a fingerprint where all
    files hold ids."""
    from datastore_service.engine.segment import MAX_VOCAB
    from datastore_service.storage.corpus import read_tokens
    from datastore_service.storage.tokenizer import load_tokenizer

    is_folder = not FINGERPRINT.fullmatch(tokenizer)
    encoder = load_tokenizer(tokenizer) if is_folder else None
    return [
        pb.Document(tokens=tokens.tolist())
        for source in sources
        for tokens in read_tokens(source, field, encoder, MAX_VOCAB)
    ]


def _requests(
    namespace: Namespace, documents: list[pb.Document], bar: Progress
) -> Iterator[pb.WarmupRequest]:
    task = bar.add_task("sending documents", total=len(documents))
    yield pb.WarmupRequest(namespace=namespace)
    for first in range(0, len(documents), DOCUMENTS_A_MESSAGE):
        some = documents[first : first + DOCUMENTS_A_MESSAGE]
        yield pb.WarmupRequest(documents=some)
        bar.advance(task, len(some))
    bar.update(task, description="sent; the service indexes")


def _last(replies: Iterable[pb.WarmupProgress]) -> pb.WarmupProgress:
    """Shows each as it comes."""
    last = pb.WarmupProgress()
    with progress() as bar:
        task = bar.add_task("the service reads")
        for last in replies:
            bar.update(task, description=f"added {last.documents:,} documents, {last.tokens:,} tokens")
    return last


def _utc(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")


def _print_tables(reply: pb.StatsReply) -> None:
    tables.print(f"version {reply.version}, up {reply.uptime_seconds:.0f} s, {reply.streams} streams")
    for stats_of in reply.namespaces:
        tables.print(_table(stats_of))


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
    if damaged := sum(tier.damaged for tier in stats_of.tiers):
        caption += f", {damaged} damaged segments taken out (see the log)"
    if not stats_of.stored:
        caption += ", live tier in memory alone"
    table = Table(title=title, caption=caption + (", with prior" if stats_of.prior else ", no prior"))
    for column in ("tier", "tokens", "bytes", "segments", "hits", "drafted", "accepted"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for tier in stats_of.tiers:
        name = pb.Tier.Name(tier.tier).removeprefix("TIER_").lower()
        counts = (tier.tokens, tier.bytes, tier.segments, tier.hits, tier.drafted, tier.accepted)
        table.add_row(name, *(f"{count:,}" for count in counts))
    return table
