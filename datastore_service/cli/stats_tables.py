"""The reply of `specstore stats` as tables for people."""

from __future__ import annotations

from rich.table import Table

from datastore_service.cli.output import tables, visible
from proto_gen.specstore.v1 import admin_pb2 as pb


def print_stats(reply: pb.StatsReply) -> None:
    tables().print(f"version {reply.version}, up {reply.uptime_seconds:.0f} s, {reply.streams} streams")
    for namespace in reply.namespaces:
        tables().print(_table(namespace))


def _table(stats: pb.NamespaceStats) -> Table:
    namespace = stats.namespace
    title = visible(f"{namespace.model} {namespace.tenant} (tokenizer {namespace.tokenizer[:12]})")
    caption = f"{stats.sessions} sessions, {stats.conversations} conversations, {stats.drafts} drafts"
    if stats.merge_failures:
        caption += f", {stats.merge_failures} failed merges (see the log)"
    if stats.log_failures:
        caption += f", {stats.log_failures} times the disk refused (see the log)"
    if damaged := sum(tier.damaged for tier in stats.tiers):
        caption += f", {damaged} damaged segments taken out (see the log)"
    if stats.epoch:
        caption += f", epoch {stats.epoch}"
    if not stats.stored:
        caption += ", live tier in memory alone"
    table = Table(title=title, caption=caption + (", with prior" if stats.prior else ", no prior"))
    for column in ("tier", "tokens", "bytes", "segments", "hits", "drafted", "accepted"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for tier in stats.tiers:
        name = pb.Tier.Name(tier.tier).removeprefix("TIER_").lower()
        counts = (tier.tokens, tier.bytes, tier.segments, tier.hits, tier.drafted, tier.accepted)
        table.add_row(name, *(f"{count:,}" for count in counts))
    return table
