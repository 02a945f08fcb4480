"""`python deploy/grafana/dashboard.py` writes specstore.json, the Grafana dashboard (Grafana 10.1 and later)."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import ReduceDataOptions, VizLegendOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableRefresh,
    VariableSort,
)

FILE = Path(__file__).with_name("specstore.json")
SOURCE = DataSourceRef(type_val="prometheus", uid="$source")
SERVICE, ENGINE = 'instance=~"$service"', 'instance=~"$engine"'
WIDTH = 24  # of Grafana's grid
STAT_HEIGHT, CHART_HEIGHT = 4, 8
CHARTS_A_ROW = 3


@dataclass(frozen=True)
class Shown:
    """A panel. queries: legend and PromQL expression of each."""

    title: str
    description: str
    queries: dict[str, str]
    unit: str = "short"


def rate(metric: str, of: str, by: str = "") -> str:
    """Of a counter, a second; summed over all but the labels `by`."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{of}}}[$__rate_interval]))"


def mean(metric: str, of: str, by: str = "") -> str:
    """Of a histogram's or a summary's observations."""
    return f"{rate(f'{metric}_sum', of, by)} / {rate(f'{metric}_count', of, by)}"


def quantile(share: float, metric: str, of: str) -> str:
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', of, 'le')})"


def quantiles(metric: str, of: str, prefix: str = "") -> dict[str, str]:
    return {f"{prefix}p{share * 100:.0f}": quantile(share, metric, of) for share in (0.5, 0.99)}


STATS = [
    Shown("Datastores", "Services that answer Prometheus.", {"": f"count(specstore_streams{{{SERVICE}}})"}),
    Shown("Connected workers", "Draft streams open.", {"": f"sum(specstore_streams{{{SERVICE}}})"}),
    Shown(
        "Open breakers",
        "Datastores that an engine does not ask at the moment. Should be 0.",
        {"": f"sum(specstore_client_breaker_open{{{ENGINE}}})"},
    ),
    Shown(
        "Draft processes",
        "Draft processes that are ready, of methods that have one.",
        {"": f"sum(specstore_draft_up{{{ENGINE}}})"},
    ),
    Shown(
        "Damaged segments",
        "Segments taken out because their files have changed. Should be 0.",
        {"": f"sum(specstore_damaged_segments{{{SERVICE}}})"},
    ),
    Shown(
        "Refused files",
        "Changed certificates or tables of identities that cannot be used, so that the earlier ones are in force. Should be 0.",
        {"": f"sum(specstore_files_refused{{{SERVICE}}})"},
    ),
    Shown(
        "Failed writes, 1 h",
        "Failed merges and outputs that could not be logged. Should be 0.",
        {
            "": f"sum(increase(specstore_merge_failures_total{{{SERVICE}}}[1h]))"
            f" + sum(increase(specstore_log_failures_total{{{SERVICE}}}[1h]))"
        },
    ),
]

SPECULATION = [
    Shown(
        "Tokens a step",
        "Tokens that a request gets from one decode step, as SGLang counts them. 1 is plain decoding.",
        # Prometheus 2 gets the second name: prometheus-client escapes colons for whoever does not ask for UTF-8 names.
        {
            "{{instance}}": f"sglang:spec_accept_length{{{ENGINE}}} or sglang_spec_accept_length{{{ENGINE}}}",
        },
    ),
    Shown(
        "Acceptance by source",
        "Share of the verified tokens that the target accepted. A tree holds alternatives of which at most one is right.",
        {
            "{{source}}": f"{rate('specstore_accepted_nodes_total', ENGINE, 'source')}"
            f" / {rate('specstore_verified_nodes_total', ENGINE, 'source')}"
        },
        "percentunit",
    ),
    Shown(
        "Accepted tokens by source",
        "Drafted tokens a second that the target accepted: what speculation gains.",
        {"{{source}}": rate("specstore_accepted_nodes_total", ENGINE, "source")},
    ),
    Shown(
        "Decode step",
        "Mean time from one launch to the next, by requests in the batch (rounded up to a power of two).",
        {"batch {{batch}}": mean("specstore_decode_step_seconds", ENGINE, "batch")},
        "s",
    ),
    Shown(
        "Rows a request",
        "Steps a second by the rows of each request: 1 is a plain step. The worker chooses what pays.",
        {"{{width}}": rate("specstore_decode_step_seconds_count", ENGINE, "width")},
    ),
    Shown(
        "The worker's own time",
        "Seconds a second by phase. On a GPU `forward` is the launch alone.",
        {"{{phase}}": rate("specstore_decode_phase_seconds_total", ENGINE, "phase")},
    ),
]

CLIENT = [
    Shown(
        "Wait for drafts",
        "How long a decode step waited for its drafts.",
        quantiles("specstore_client_step_seconds", ENGINE),
        "s",
    ),
    Shown(
        "Failed asks",
        "Steps a second without an answer: `deadline`, it came too late; `unreachable`, there is no service. Draft trees a second that cannot"
        " be right, by their `fault`.",
        {
            "{{reason}}": rate("specstore_client_failures_total", ENGINE, "reason"),
            "damaged tree {{fault}}": rate("specstore_client_damaged_trees_total", ENGINE, "fault"),
        },
    ),
    Shown(
        "Circuit breaker",
        "1 while an engine does not ask the datastore.",
        {"{{endpoint}}": f"max by (endpoint) (specstore_client_breaker_open{{{ENGINE}}})"},
    ),
    Shown(
        "Disconnects",
        "Streams opened again in 5 minutes, sessions sent again, and sessions moved to another datastore.",
        {
            "connects": f"sum(increase(specstore_client_connects_total{{{ENGINE}}}[5m]))",
            "resyncs": f"sum(increase(specstore_client_resyncs_total{{{ENGINE}}}[5m]))",
            "moves": f"sum(increase(specstore_client_moves_total{{{ENGINE}}}[5m]))",
        },
    ),
    Shown(
        "Drafts without the datastore",
        "Trees a second from the worker's own text, because no datastore answered.",
        {"fallback": rate("specstore_client_fallback_drafts_total", ENGINE)},
    ),
    Shown(
        "Sessions from prefill",
        "On decode instances: whether the datastore had the session at the first step.",
        {"{{session}}": rate("specstore_client_takeovers_total", ENGINE, "session")},
    ),
    Shown(
        "Sessions of clients",
        "Calls whose client names its session, by where it does so; unusable: what was no name.",
        {"{{source}}": rate("specstore_request_conversations_total", ENGINE, "source")},
    ),
]

DATASTORE = [
    Shown(
        "Answer",
        "Time to answer one message of a worker, and the engine's part of it.",
        quantiles("specstore_step_seconds", SERVICE)
        | quantiles("specstore_engine_seconds", SERVICE, "engine "),
        "s",
    ),
    Shown(
        "Refusals",
        "In 5 minutes: calls refused, by status code; entries of messages for which there was no room, by model; what a tenant's quota "
        "refused; and names of priors that requests may not use.",
        {
            "{{code}}": f"sum by (code) (increase(specstore_refusals_total{{{SERVICE}}}[5m]))",
            "entries {{model}}": f"sum by (model) (increase(specstore_over_budget_total{{{SERVICE}}}[5m]))",
            "quota {{quota}} {{tenant}}": f"sum by (quota, tenant) (increase(specstore_quota_refusals_total{{{SERVICE}}}[5m]))",
            "priors {{model}} {{tenant}}": "sum by (model, tenant)"
            f" (increase(specstore_unknown_priors_total{{{SERVICE}}}[5m]))",
        },
    ),
    Shown(
        "Limits",
        "Share of each limit and quota that is in use. At 1 streams, namespaces, sessions and what a quota bounds are refused; a full live "
        "tier forgets, and so do full workspaces.",
        {
            "streams {{instance}}": f"specstore_streams{{{SERVICE}}} / specstore_stream_limit",
            "namespaces {{instance}}": f"count by (job, instance) (specstore_sessions{{{SERVICE}}})"
            " / on (job, instance) specstore_namespace_limit",
            "sessions {{model}} {{tenant}}": f"specstore_sessions{{{SERVICE}}} / specstore_session_limit",
            "tokens {{tier}} {{model}} {{tenant}}": f"specstore_tokens{{{SERVICE}}} / specstore_token_limit",
            "quota {{quota}} {{tenant}}": f"specstore_quota_used{{{SERVICE}}} / specstore_quota",
            "workspaces {{model}} {{tenant}}": f"specstore_workspace_tokens{{{SERVICE}}}"
            " / specstore_workspace_token_limit",
        },
        "percentunit",
    ),
    Shown(
        "Sessions",
        "Open sessions, texts kept for a conversation's next request, workspaces, groups of running requests, and the epoch of the weights.",
        {
            "sessions {{model}} {{tenant}}": f"sum by (model, tenant) (specstore_sessions{{{SERVICE}}})",
            "conversations {{model}} {{tenant}}": f"sum by (model, tenant) (specstore_conversations{{{SERVICE}}})",
            "workspaces {{model}} {{tenant}}": f"sum by (model, tenant) (specstore_workspaces{{{SERVICE}}})",
            "groups {{model}} {{tenant}}": f"sum by (model, tenant) (specstore_groups{{{SERVICE}}})",
            "epoch {{model}} {{tenant}}": f"max by (model, tenant) (specstore_epoch{{{SERVICE}}})",
        },
    ),
    Shown(
        "Memory",
        "The process, and of that what each tier, all workspaces and all groups hold. A prior's files are mapped: the system may drop them.",
        {
            "{{tier}}": f"sum by (tier) (specstore_bytes{{{SERVICE}}})",
            "workspaces": f"sum(specstore_workspace_bytes{{{SERVICE}}})",
            "groups": f"sum(specstore_group_bytes{{{SERVICE}}})",
            "process {{instance}}": "process_resident_memory_bytes and on (job, instance)"
            f" specstore_streams{{{SERVICE}}}",
        },
        "bytes",
    ),
    Shown(
        "Outputs shared",
        "Per second, with other services (`--share`). Refused and failed should be 0; dropped has left the live tier unsent.",
        {
            word: f"sum(rate(specstore_share_{word}_total{{{SERVICE}}}[$__rate_interval]))"
            for word in ("sent", "taken", "dropped", "refused", "failures", "missed")
        },
    ),
    Shown(
        "Outputs not shared yet",
        "They rise while a service is cut off from the others (connected 0), and fall afterwards.",
        {
            "outputs {{model}} {{tenant}}": f"sum by (model, tenant) (specstore_share_unsent{{{SERVICE}}})",
            "forgets": f"sum(specstore_share_forgets_unsent{{{SERVICE}}})",
            "connected {{instance}}": f"specstore_share_connected{{{SERVICE}}}",
        },
    ),
    Shown(
        "Tokens by tier",
        "What each tier holds.",
        {
            "{{tier}} {{model}} {{tenant}}": f"sum by (tier, model, tenant) (specstore_tokens{{{SERVICE}}})",
        },
    ),
    Shown(
        "Segments by tier",
        "Many and rising: merges fail or do not keep up.",
        {"{{tier}} {{model}} {{tenant}}": f"sum by (tier, model, tenant) (specstore_segments{{{SERVICE}}})"},
    ),
    Shown(
        "Hits by tier",
        "Share of the drafts with a token of the tier.",
        {
            "{{tier}}": f"{rate('specstore_hits_total', SERVICE, 'tier')}"
            f" / on () group_left () {rate('specstore_drafts_total', SERVICE)}"
        },
        "percentunit",
    ),
    Shown(
        "Acceptance by tier",
        "Share of the drafted tokens with which the session continued, verified or not.",
        {
            "{{tier}}": f"{rate('specstore_accepted_tokens_total', SERVICE, 'tier')}"
            f" / {rate('specstore_drafted_tokens_total', SERVICE, 'tier')}"
        },
        "percentunit",
    ),
    Shown(
        "Logs",
        "Text in logs that is not in segments yet, and what of it a power failure would take.",
        {
            "in logs": f"sum(specstore_log_bytes{{{SERVICE}}})",
            "not synced": f"sum(specstore_log_unsynced_bytes{{{SERVICE}}})",
        },
        "bytes",
    ),
]

DRAFT_PROCESS = [
    Shown(
        "Ready and restarts",
        "Draft processes that are ready, and restarts in 5 minutes.",
        {
            "ready {{instance}}": f"specstore_draft_up{{{ENGINE}}}",
            "restarts {{instance}}": f"increase(specstore_draft_restarts_total{{{ENGINE}}}[5m])",
        },
    ),
    Shown(
        "Speculation cache",
        "Outcomes a second that were drafted for before they were known: hits, misses, and misses that were waited for.",
        {"{{result}}": rate("specstore_speculation_lookups_total", ENGINE, "result")},
    ),
    Shown(
        "Draft forward",
        "Mean time of the draft model's forwards, by rows (rounded up to a power of two), and of its rounds.",
        {
            "{{rows}} rows": mean("specstore_draft_forward_seconds", ENGINE, "rows"),
            "round": mean("specstore_draft_round_seconds", ENGINE),
        },
        "s",
    ),
    Shown(
        "Room in its KV cache",
        "A second: forwards without room, sessions whose room was given to others, and sessions that it cannot take at all.",
        {
            "no room": rate("specstore_draft_no_room_total", ENGINE),
            "evicted": rate("specstore_draft_evicted_total", ENGINE),
            "not taken, {{reason}}": rate("specstore_draft_not_taken_total", ENGINE, "reason"),
        },
    ),
    Shown(
        "Dropped",
        "A second: messages not sent or not collected, verifications heard of too late, drafted tokens not used.",
        {
            "message {{reason}}": rate("specstore_draft_dropped_total", ENGINE, "reason"),
            "token {{reason}}": rate("specstore_growth_dropped_total", ENGINE, "reason"),
            "stale": rate("specstore_draft_stale_messages_total", ENGINE),
        },
    ),
    Shown(
        "Messages",
        "Bytes a second between the worker and the draft process.",
        {"{{direction}}": rate("specstore_draft_bytes_total", ENGINE, "direction")},
        "Bps",
    ),
]

ROWS = {
    "Speculation": SPECULATION,
    "Engine's side of the datastore": CLIENT,
    "Datastore": DATASTORE,
    "Draft process (SAGUARO, DOUBLE, DUO, MIRROR, ADAPTIVE)": DRAFT_PROCESS,
}


def filled(panel, shown: Shown):
    """A panel's builder with everything but its look."""
    panel.title(shown.title).description(shown.description).unit(shown.unit).datasource(SOURCE)
    for number, (legend, expression) in enumerate(shown.queries.items()):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + number))
        panel.with_target(query.datasource(SOURCE))
    return panel


def chart(shown: Shown) -> timeseries.Panel:
    legend = (
        VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    panel = filled(timeseries.Panel(), shown).legend(legend).min(0).fill_opacity(10)
    return panel.height(CHART_HEIGHT).span(WIDTH // CHARTS_A_ROW)


def number(shown: Shown) -> stat.Panel:
    panel = filled(stat.Panel(), shown).reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
    return panel.height(STAT_HEIGHT).span(WIDTH // len(STATS)).no_value("none")


def instances(name: str, label: str, metric: str) -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable(name).label(label).datasource(SOURCE)
    variable.query(f"label_values({metric}, instance)").refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    return variable.multi(True).include_all(True).all_value(".*").sort(VariableSort.ALPHABETICAL_ASC)


def specstore() -> dashboard.Dashboard:
    board = dashboard.Dashboard("specstore").uid("specstore").tags(["specstore", "sglang"]).editable()
    board.description("Retrieval speculative decoding: engines, datastores and draft processes.")
    board.time("now-1h", "now").refresh("30s").tooltip(DashboardCursorSync.CROSSHAIR)
    board.with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
    board.with_variable(instances("service", "Datastore", "specstore_streams"))
    board.with_variable(instances("engine", "Engine", "specstore_decode_step_seconds_count"))
    for shown in STATS:
        board.with_panel(number(shown))
    for title, charts in ROWS.items():
        board.with_row(dashboard.Row(title))
        for shown in charts:
            board.with_panel(chart(shown))
    return board


def text() -> str:
    return JSONEncoder(sort_keys=True, indent=2).encode(specstore().build()) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    FILE.write_text(text())
