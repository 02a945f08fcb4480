"""`make reference`: writes flags.md, cli.md and metrics.md from the code that has the flags, the commands and the metrics.

A meaning stands once, where the program shows it itself: in `--help`, or in the HELP line of a metric. A test
(tests/unit/docs/test_reference.py) compares the pages with the code.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from typer.main import get_command

from datastore_service.cli.main import app
from datastore_service.server import metrics as service
from sglang_patches.options import CONFIG_FILE_VARIABLE, ENVIRONMENT_PREFIX, Options

CHECKOUT = Path(__file__).parents[1]
KINDS = ("Counter", "Gauge", "Histogram", "Summary")

FLAGS = f"""# Flags

Every flag of the plugin: what `sglang serve` and `python -m sglang.launch_server` take beside SGLang's own. `make reference` writes this
page.

A flag wins over its environment variable, that over the file of `--specstore-config` (`{CONFIG_FILE_VARIABLE}`), that over the default. The
file is TOML, with the keys at its top: `deadline_ms = 10` is `--specstore-deadline-ms 10`. `sgl.Engine` in a Python program takes the
variables and the file. A value that cannot be is refused at the start, in one line that names the option.

SGLang's own flags stay SGLang's: `--speculative-algorithm` names the method, `--speculative-draft-model-path` the draft model or the head.
[Settings](settings.md) says what becomes of all others. A request may ask for less than its server's flags:
[what a request may say](requests.md).
"""
CLI = """# Commands

Every command and option of `specstore`. `make reference` writes this page, and `specstore COMMAND --help` says the same.

They print tables and sentences for people. `--json` prints the reply instead, in protobuf's JSON (64-bit numbers are strings), with the
fields of `protos/specstore/v1/admin.proto`. An error is one line on standard error, with exit status 2 for a bad argument and 1 for
anything else.

`--model` is the name of the model's folder, as SGLang has it. `--tokenizer` is that folder, or the fingerprint that `specstore namespaces`
shows. `--tenant` is the tenant, if there is one.
"""
SERVICE = "Options that say how the service is asked"
METRICS = """# Metrics

Every metric that specstore exports to Prometheus, and those of SGLang that show what it does. `make reference` writes this page. How to
scrape them, the dashboard and the alerts are in [monitoring](monitoring.md#dashboard-and-alerts), what to do when an alert fires in the
[runbook](runbook.md).

Counters only rise: read them with `rate()`. A histogram or summary `x` is shown as `x_sum` and `x_count`, a histogram also as `x_bucket`.
"""
OF_SERVICE = """`specstore serve --metrics-port PORT` shows these at `/metrics`, and the numbers of the process (`process_*`). An OTLP
collector gets the same ([monitoring](monitoring.md#metrics-and-status-page)).

The acceptance rate of a tier is `rate(specstore_accepted_tokens_total[5m]) / rate(specstore_drafted_tokens_total[5m])`. A draft tree holds
alternatives of which at most one is accepted, so it is far below 1.
"""
OF_ENGINE = """SGLang's `/metrics` shows these with `--enable-metrics`. With tensor parallelism they are the first rank's.

The acceptance rate of a source is `rate(specstore_accepted_nodes_total[5m]) / rate(specstore_verified_nodes_total[5m])`.
"""
OF_SGLANG = """Gauges of SGLang, renewed with each line of its log (`--decode-log-interval`). Prometheus 2 is told `sglang_` for `sglang:`.
"""
SGLANG = {
    "sglang:spec_accept_length": "accept length: tokens per request and decode step, the target's own included; 1.0 without drafts. The first "
    "number to look at",
    "sglang:spec_accept_rate": "acceptance rate: accepted over verified tokens. Without the plugin, and on SGLang 0.5.17, SGLang divides by the "
    "widest tree in every step, which is too low where the speculation length varies",
    "sglang:gen_throughput": "generated tokens per second of all requests",
    "sglang:num_running_reqs": "requests in the batch: what drafting gains falls as it grows",
    "sglang:num_queue_reqs": "requests that wait for room in the batch",
    "sglang:token_usage": "share of the KV cache in use. A draft process has a KV cache of its own",
}


ENGINE_PARTS = {  # by the beginning of a metric's name, the longest that fits
    "specstore_client_": "Asking the datastore",
    "specstore_": "Decode steps",
    "specstore_draft_": "The draft process",
}


class Metric(NamedTuple):
    """A metric of the product.

    kind: Counter, Gauge, Histogram or Summary.
    name: without the endings that prometheus-client adds."""

    kind: str
    name: str
    meaning: str
    labels: Sequence[str]


def flags() -> Iterator[str]:
    config = _code("--specstore-config"), _code(CONFIG_FILE_VARIABLE), "", "", "TOML file with these options"
    yield FLAGS
    yield from _table(
        ("flag", "variable", "TOML key", "default", "meaning"),
        [config, *map(_flag, dataclasses.fields(Options))],
    )


def _flag(option: dataclasses.Field[Any]) -> tuple[str, ...]:
    values = ", ".join(map(_code, option.metadata["choices"]))
    return (
        _code("--specstore-" + option.name.replace("_", "-")),
        _code(ENVIRONMENT_PREFIX + option.name.upper()),
        _code(option.name),
        _default(option.default),
        _marked(option.metadata["help"]) + (f" ({values})" if values else ""),
    )


def commands() -> Iterator[str]:
    yield CLI
    named: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    for name, command in named.items():
        yield from _command(name, command)
    asking = {o.opts[0]: o for command in named.values() for o in command.params if _asks(o)}
    yield f"## {SERVICE}\n"
    yield from _table(("option", "variable", "default", "meaning"), map(_asking, asking.values()))


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [_name(parameter) for parameter in command.params if not _dashed(parameter)]
    yield f"## {name}\n\n{_marked(' '.join(command.help.split()))}\n\n    specstore {' '.join([name, *arguments, '[OPTIONS]'])}\n"
    asking = [_code(option.opts[0]) for option in command.params if _asks(option)]
    own = [option for option in command.params if not _asks(option)]
    if own:
        yield from _table(("option", "default", "meaning"), map(_option, own))
    if asking:
        yield f"[How the service is asked](#{SERVICE.lower().replace(' ', '-')}): {', '.join(asking)}.\n"


def _option(option: Any) -> tuple[str, ...]:
    shown = f"{_name(option)} {_dashed(option) and option.metavar or ''}".strip()
    default = "required" if option.required else _default(option.default)
    return _code(shown), default, _marked(option.help) + _bounds(option.min, option.max)


def _asking(option: Any) -> tuple[str, ...]:
    name, default, meaning = _option(option)
    return name, _code(option.envvar) if option.envvar else "", default, meaning


def _asks(option: Any) -> bool:
    return option.rich_help_panel == "Service"


def _dashed(parameter: Any) -> bool:
    return parameter.opts[0].startswith("--")


def _name(parameter: Any) -> str:
    if _dashed(parameter):
        return parameter.opts[0]
    return (parameter.metavar or parameter.name.upper()) + "..." * (parameter.nargs < 0)


def _bounds(least: float | None, most: float | None) -> str:
    if least is None:
        return ""
    return f" (at least {least})" if most is None else f" ({least} to {most})"


def metrics() -> Iterator[str]:
    yield METRICS
    yield f"## The datastore service\n\n{OF_SERVICE}"
    yield from _metrics(of_the_service())
    yield f"## The engine\n\n{OF_ENGINE}"
    engine = sorted(of_the_engine(), key=lambda metric: metric.name)
    for beginning, title in ENGINE_PARTS.items():
        yield f"### {title}\n"
        yield from _metrics(metric for metric in engine if _part(metric.name) == beginning)
    yield f"## SGLang's own\n\n{OF_SGLANG}"
    yield from _table(("metric", "meaning"), [(_code(name), meaning) for name, meaning in SGLANG.items()])


def of_the_service() -> Iterator[Metric]:
    """The metrics of `specstore serve`."""
    server = CHECKOUT / "datastore_service" / "server"
    yield from _defined(server / "metrics.py")
    yield from _defined(server / "sharing" / "metrics.py")
    for figures, labels in (
        (service.OF_NAMESPACES, service.NAMESPACE_LABELS),
        (service.OF_TIERS, service.TIER_LABELS),
        (service.OF_QUOTAS, service.QUOTA_LABELS),
    ):
        for figure in figures:
            kind = figure.family.__name__.removesuffix("MetricFamily")
            yield Metric(kind, figure.name, figure.meaning, labels)


def of_the_engine() -> Iterator[Metric]:
    """The metrics of the plugin and of the datastore's client, which are SGLang's process's."""
    for folder in ("datastore_service/client", "sglang_patches"):
        for file in sorted((CHECKOUT / folder).rglob("*.py")):
            yield from _defined(file)


def _defined(module: Path) -> Iterator[Metric]:
    """The metrics that a module makes. It is read and not imported: that may need a GPU's libraries."""
    for call in ast.walk(ast.parse(module.read_text())):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in KINDS:
            name, meaning, *labels = map(ast.literal_eval, call.args)
            yield Metric(call.func.id, name, meaning, *(labels or [[]]))


def _part(name: str) -> str:
    return max((beginning for beginning in ENGINE_PARTS if name.startswith(beginning)), key=len)


def _metrics(shown: Iterable[Metric]) -> Iterator[str]:
    return _table(("metric", "kind", "labels", "meaning"), map(_metric, shown))


def _metric(metric: Metric) -> tuple[str, ...]:
    name = metric.name + "_total" * (metric.kind == "Counter")
    return _code(name), metric.kind.lower(), ", ".join(map(_code, metric.labels)), _marked(metric.meaning)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for cells in rows:
        yield f"| {' | '.join(cells)} |"
    yield ""


def _marked(meaning: str) -> str:
    """A meaning with its flags and metrics as code."""
    return re.sub(r"(?<![`\w])(--[a-z][a-z-]+|specstore_\w+)", r"`\1`", meaning)


def _code(text: str) -> str:
    return f"`{text}`"


def _default(value: Any) -> str:
    """The default of an option, empty where that is nothing: no file, no name, a switch that is off."""
    if value is None or value is False or value == "":
        return ""
    return _code(f"{value:g}" if isinstance(value, float) else str(value))


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "flags.md": flags,
    "cli.md": commands,
    "metrics.md": metrics,
}


def page(name: str) -> str:
    return "\n".join(PAGES[name]())


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name in PAGES:
        (CHECKOUT / "docs" / name).write_text(page(name))
