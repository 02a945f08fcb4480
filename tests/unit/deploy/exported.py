"""Which metrics the product exports, and with which labels: the service's from a real scrape, the engine's as docs/reference.py
finds them in the code."""

from __future__ import annotations

import ast
import importlib.util
import runpy
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Namespace
from datastore_service.server.sharing.metrics import ShareMetrics
from datastore_service.storage.quota_file import Quota
from proto_gen.specstore.v1 import admin_pb2
from proto_gen.specstore.v1.admin_pb2_grpc import AdminStub
from tests.unit.server.service import running, serving

CHECKOUT = Path(__file__).parents[3]
SAMPLES = {  # endings of a metric's samples, with the labels that they add
    "Counter": {"_total": set()},
    "Gauge": {"": set()},
    "Histogram": {"_bucket": {"le"}, "_sum": set(), "_count": set()},
    "Summary": {"_sum": set(), "_count": set()},
}
REFERENCE = runpy.run_path(str(CHECKOUT / "docs" / "reference.py"))
SGLANG_METRICS = "srt/observability/metrics_collector.py"

Exported = dict[str, set[str]]  # names of labels by name of sample


def of_the_service() -> Exported:
    """Read from a service with a worker's namespace, a quota and a refused call."""
    with running(token="secret") as service, serving(service) as url:
        service.namespaces.quotas.set("tenant", Quota(sessions=8))
        worker = GrpcDatastore(service.endpoint, Namespace("model", "t" * 64, "tenant"))
        assert worker.wait_connected(60.0)
        worker.close()
        with grpc.insecure_channel(service.endpoint) as channel:
            call = AdminStub(channel).Stats.future(admin_pb2.StatsRequest())
            assert call.code() is grpc.StatusCode.UNAUTHENTICATED
        with urllib.request.urlopen(f"{url}metrics") as reply:
            families = text_string_to_metric_families(reply.read().decode())
        exported: Exported = {}
        for sample in (sample for family in families for sample in family.samples):
            exported.setdefault(sample.name, set()).update(sample.labels)
        return exported


def of_sharing() -> Exported:
    """Defined by the thread that shares, with one namespace and one reason."""
    registry = CollectorRegistry()
    for metric in vars(ShareMetrics(registry)).values():
        if metric._labelnames:
            metric.labels(*metric._labelnames)
    exported: Exported = {}
    for sample in (sample for family in registry.collect() for sample in family.samples):
        exported.setdefault(sample.name, set()).update(sample.labels)
    return exported


def of_the_engine() -> Exported:
    """Defined by the plugin and by the client of the datastore."""
    return samples(REFERENCE["of_the_engine"]())


def samples(metrics: Iterable) -> Exported:
    """The samples of metrics, as docs/reference.py has these."""
    return {
        metric.name + ending: {*metric.labels, *added}
        for metric in metrics
        for ending, added in SAMPLES[metric.kind].items()
    }


def of_sglang() -> Exported:
    """SGLang's gauges, without its labels: they depend on its flags. Each also as Prometheus 2 is told it, without colons.
    Empty where SGLang is not installed."""
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        return {}
    tree = ast.parse((Path(found.origin).parent / SGLANG_METRICS).read_text())
    words = (keyword for call in _calls(tree, {"Gauge"}) for keyword in call.keywords)
    names = {ast.literal_eval(word.value) for word in words if word.arg == "name"}
    return {name: set() for name in names | {name.replace(":", "_") for name in names}}


def strings_of_the_code() -> set[str]:
    """Every string of the two packages: the values of labels are among them."""
    files = [
        file
        for folder in ("sglang_patches", "datastore_service")
        for file in (CHECKOUT / folder).rglob("*.py")
    ]
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _calls(tree: ast.Module, names: set[str]) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            yield node
