"""The Helm chart: Kubernetes' schema takes what it renders, and `specstore serve` takes its words."""

from __future__ import annotations

import base64
import copy
import json
import re
import tomllib
import typing
from pathlib import Path

import jsonschema
import pytest
import trustme
import yaml

from datastore_service.cli.main import Fusion, serve
from datastore_service.endpoint import parse_endpoints
from datastore_service.server.service import END_SECONDS
from sglang_patches.launch.processes import Child, free_port, wait_until
from tests.integration.datastore.conftest import SPECSTORE, specstore
from tests.unit.certificates import issue
from tests.unit.deploy.chart import CHART, EVERYTHING, NAMESPACE, helm, pod, render, values_file
from tests.unit.deploy.exported import CHECKOUT
from tests.unit.deploy.memory import SERVE, most_bytes

ALWAYS = {"StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy"}
OPERATORS = {
    "ServiceMonitor",
    "PrometheusRule",
    "Certificate",
}  # not Kubernetes' own: their schemas are not in kubernetes-validate
KUBERNETES = ("1.27", "1.37")
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.mark.parametrize(
    ("values", "kinds"),
    [({}, ALWAYS), (EVERYTHING, ALWAYS | OPERATORS | {"ConfigMap"})],
    ids=["defaults", "everything"],
)
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_every_manifest(values, kinds, version, tmp_path):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    manifests = render(tmp_path, values)
    assert {manifest["kind"] for manifest in manifests} == kinds
    for manifest in manifests:
        assert manifest["metadata"]["namespace"] == NAMESPACE
        if manifest["kind"] not in OPERATORS:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_kubernetes_schema_refuses_a_manifest_with_a_wrong_field(tmp_path):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    manifests = render(tmp_path, {})
    pod(manifests)["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        for manifest in manifests:
            kubernetes_validate.validate(manifest, KUBERNETES[-1], strict=True)


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_serve_takes_the_words(values, tmp_path):
    words = words_of(pod(render(tmp_path, values)))
    assert words.pop(0) == "serve"
    given = SERVE.make_context("serve", words).params
    for option, value in values.get("options", {}).items():
        assert given[snake_case(option)] == value
    assert given["tls_client_ca"] == (Path("/tls/ca.crt") if values else None)
    assert given["share"] == values.get("share", {}).get("url", "")
    assert given["share_tls_ca"] == (Path("/share/ca.crt") if values else None)
    assert given["share_tls_certificate"] == (Path("/share-client/tls.crt") if values else None)
    assert given["share_tls_key"] == (Path("/share-client/tls.key") if values else None)
    assert given["encryption_keys"] == (Path("/encryption/keys") if values else None)
    assert given["identities"] == (Path("/identities/identities.toml") if values else None)
    assert list(given["tenant_prior"]) == (["a customer=/prior/customers/a"] if values else [])


def test_selectors_and_ports_name_what_is_there(tmp_path):
    manifests = {manifest["kind"]: manifest for manifest in render(tmp_path, EVERYTHING)}
    specs = {kind: manifest["spec"] for kind, manifest in manifests.items() if "spec" in manifest}
    stateful, service = specs["StatefulSet"], specs["Service"]
    of_pods = [
        stateful["selector"]["matchLabels"],
        service["selector"],
        specs["PodDisruptionBudget"]["selector"]["matchLabels"],
        specs["NetworkPolicy"]["podSelector"]["matchLabels"],
    ]
    labels = stateful["template"]["metadata"]["labels"]
    assert all(selector and selector.items() <= labels.items() for selector in of_pods)
    monitor = specs["ServiceMonitor"]
    of_services = monitor["selector"]["matchLabels"]
    assert of_services and of_services.items() <= manifests["Service"]["metadata"]["labels"].items()
    assert stateful["serviceName"] == manifests["Service"]["metadata"]["name"]

    (container,) = stateful["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    words = words_of(pod(list(manifests.values())))
    assert {f"--listen=0.0.0.0:{ports['grpc']}", f"--metrics-port={ports['http-metrics']}"} <= set(words)
    assert {port["name"]: port["port"] for port in service["ports"]} == ports
    assert all(port["targetPort"] == port["name"] for port in service["ports"])
    allowed = [port["port"] for rule in specs["NetworkPolicy"]["ingress"] for port in rule["ports"]]
    assert sorted(allowed) == sorted(ports)
    assert [endpoint["port"] for endpoint in monitor["endpoints"]] == ["http-metrics"]


def test_the_schema_has_serve_s_options_and_bounds():
    of_serve = typing.get_type_hints(serve, include_extras=True)
    options = SCHEMA["properties"]["options"]["properties"]
    assert options.keys() == EVERYTHING["options"].keys()
    assert set(options["fusion"]["enum"]) == set(Fusion)
    for name, schema in options.items():
        (option,) = of_serve[snake_case(name)].__metadata__
        for bound, of_option in (("minimum", option.min), ("maximum", option.max)):
            assert of_option is None or schema[bound] == of_option, name


WRONG = [
    ({"options": {"fusion": "fast"}}, "fusion"),
    ({"options": {"vocabsize": 5}}, "vocabsize"),
    ({"options": {"tokens": "many"}}, "tokens"),
    ({"options": {"streams": 5000}}, "streams"),
    ({"replicas": 0}, "replicas"),
    ({"replica": 2}, "replica"),
    ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    ({"tls": {"clientCertificates": True}}, "secretName"),
    ({"prior": {"tenants": {"a": "customers/a"}}}, "claimName"),
    ({"prior": {"claimName": "prior", "tenants": {"a": "../other"}}}, "tenants"),
    ({"tls": {"issuer": {"name": "ca", "kind": "Issuer"}}}, "secretName"),
    ({"persistence": {"size": "10 GB"}}, "size"),
    ({"persistence": {"enabled": False, "encryptionSecretName": "keys"}}, "enabled"),
    ({"share": {"url": "http://valkey"}}, "url"),
    ({"share": {"url": "valkeys://specstore:secret@valkey"}}, "url"),
    ({"share": {"url": "valkey://valkey", "caSecretName": "ca"}}, "url"),
    ({"share": {"url": "valkey://valkey", "clientSecretName": "client"}}, "url"),
    ({"metrics": {"prometheusRule": {"enabled": True, "runbook": ""}}}, "runbook"),
    ({"networkPolicy": {"engines": []}}, "engines"),
    ({"metrics": {"port": 9090}}, "port"),
    ({"env": [{"name": "SPECSTORE_ADMIN_TOKEN", "value": "x"}]}, "name"),
]


@pytest.mark.parametrize(("values", "name"), WRONG, ids=[json.dumps(values) for values, _ in WRONG])
def test_the_schema_refuses_a_wrong_value_by_name(values, name):
    with pytest.raises(jsonschema.ValidationError) as refused:
        jsonschema.validate(merged(DEFAULTS, values), SCHEMA)
    assert name in f"{refused.value.json_path} {refused.value.message}"


@pytest.mark.parametrize(("values", "name"), WRONG, ids=[json.dumps(values) for values, _ in WRONG])
def test_helm_refuses_a_wrong_value_by_name(values, name, tmp_path):
    done = helm("template", "specstore", CHART, "--values", values_file(tmp_path, values))
    assert done.returncode != 0
    assert name in done.stderr


def test_the_schema_takes_the_defaults_and_everything():
    jsonschema.validate(DEFAULTS, SCHEMA)
    jsonschema.validate(merged(DEFAULTS, EVERYTHING), SCHEMA)


def test_the_rules_and_the_dashboard_are_those_of_deploy(tmp_path):
    manifests = {manifest["kind"]: manifest for manifest in render(tmp_path, EVERYTHING)}
    deploy = CHECKOUT / "deploy"
    assert json.loads(manifests["ConfigMap"]["data"]["specstore.json"]) == json.loads(
        (deploy / "grafana" / "specstore.json").read_text()
    )
    expected = yaml.safe_load((deploy / "prometheus" / "specstore.rules.yml").read_text())["groups"]
    for rule in expected[0]["rules"]:
        anchor = rule["annotations"].pop("runbook").partition("#")[2]
        rule["annotations"]["runbook_url"] = f"https://wiki.example/runbook#{anchor}"
    assert manifests["PrometheusRule"]["spec"]["groups"] == expected


def test_the_certificate_names_every_replica_and_what_the_probe_asks(tmp_path):
    manifests = {manifest["kind"]: manifest for manifest in render(tmp_path, EVERYTHING)}
    spec, service = manifests["Certificate"]["spec"], manifests["Service"]["metadata"]["name"]
    assert spec["dnsNames"] == [f"*.{service}.{NAMESPACE}.svc", "localhost"]
    (volume,) = [each for each in pod([*manifests.values()])["volumes"] if each["name"] == "tls"]
    assert volume["secret"]["secretName"] == spec["secretName"]


def test_sharing_with_no_way_out_is_refused(tmp_path):
    values = {"share": {"url": "valkeys://valkey.example"}}
    done = helm("template", "specstore", CHART, "--values", values_file(tmp_path, values))
    assert (
        done.returncode != 0
        and "networkPolicy.egress: needs rules for the server of share.url" in done.stderr
    )
    values["networkPolicy"] = {"enabled": False}
    assert "--share=valkeys://valkey.example" in words_of(pod(render(tmp_path, values)))


def test_the_pod_may_do_little(tmp_path):
    """Kubernetes' Pod Security Standard `restricted`, a read-only root, and no token of the cluster."""
    spec = pod(render(tmp_path, EVERYTHING))
    assert (
        spec["securityContext"].items()
        >= {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}.items()
    )
    assert spec["automountServiceAccountToken"] is False
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"requests", "limits"} <= container["resources"].keys()


def test_the_limit_of_memory_is_what_the_service_s_limits_permit(tmp_path):
    spec = pod(render(tmp_path, {}))
    most = most_bytes(words_of(spec)[1:])
    memory = spec["containers"][0]["resources"]["limits"]["memory"]
    assert memory.endswith("Gi")
    assert 0.5 < most / (int(memory.removesuffix("Gi")) << 30) < 0.9, "some of it is the page cache's"


def test_the_pod_gets_the_time_that_the_service_takes_to_stop(tmp_path):
    assert pod(render(tmp_path, {}))["terminationGracePeriodSeconds"] > END_SECONDS


def test_without_persistence_nothing_is_claimed(tmp_path):
    manifests = render(tmp_path, {"persistence": {"enabled": False}})
    assert not any("volumeClaimTemplates" in manifest["spec"] for manifest in manifests)
    assert not [word for word in words_of(pod(manifests)) if word.startswith("--data")]


def test_the_notes_name_every_replica_for_the_engines(tmp_path):
    done = helm(
        "install",
        "mine",
        CHART,
        "--namespace",
        NAMESPACE,
        "--dry-run=client",
        "--values",
        values_file(tmp_path, {"replicas": 2}),
    )
    assert done.returncode == 0, done.stderr
    (endpoints,) = re.findall(r"--specstore-endpoint (\S+)", done.stdout)
    assert list(parse_endpoints(endpoints)) == [
        f"mine-specstore-{i}.mine-specstore.ml.svc:50061" for i in (0, 1)
    ]


def test_the_chart_has_the_version_of_the_package():
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == project["version"]


def test_a_service_with_the_pod_s_words_answers_its_probe(tmp_path):
    """With TLS, client certificates and a table of identities. Paths and ports are this machine's."""
    spec = pod(render(tmp_path, EVERYTHING | {"prior": {"claimName": "", "tenants": {}}}))
    files = issue(tmp_path / "files", trustme.CA(), "localhost")
    (tmp_path / "data").mkdir()
    keys = tmp_path / "keys"
    keys.write_text(f"k1 {base64.b64encode(bytes(32)).decode()}\n")
    table = tmp_path / "table"
    table.write_text('[identities.engine]\ncertificates = ["dns:engine"]\ndraft = ["*"]\n')
    port = str(free_port())
    here = {
        "/identities/identities.toml": str(table),
        "/encryption/keys": str(keys),
        "/share/ca.crt": str(files.ca),
        "/share-client/tls.crt": str(files.certificate),
        "/share-client/tls.key": str(files.key),
        "valkey.example:6379": f"127.0.0.1:{free_port()}",  # nobody listens there
        "/tls/tls.crt": str(files.certificate),
        "/tls/tls.key": str(files.key),
        "/tls/ca.crt": str(files.ca),
        "/data": str(tmp_path / "data"),
        "0.0.0.0": "127.0.0.1",
        "50061": port,
        "9090": "0",
    }
    variables = environment(spec, here) | {"SPECSTORE_ADMIN_TOKEN": "secret"}
    variables.pop("OTEL_EXPORTER_OTLP_ENDPOINT")
    service = Child(
        "datastore",
        [*SPECSTORE, *(placed(word, here) for word in words_of(spec))],
        variables,
        tmp_path / "log",
        show=False,
    )
    _, *probe = spec["containers"][0]["livenessProbe"]["exec"]["command"]
    try:
        wait_until(
            lambda: specstore(*probe, **variables).returncode == 0, [service], poll_seconds=0.5, seconds=60
        )
        without = variables | {"SPECSTORE_TLS_CERTIFICATE": "", "SPECSTORE_TLS_KEY": ""}
        assert specstore(*probe, **without).returncode == 1
    finally:
        service.kill()


def snake_case(name: str) -> str:
    return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)


def words_of(spec: dict) -> list[str]:
    return list(spec["containers"][0]["args"])


def environment(spec: dict, here: dict[str, str]) -> dict[str, str]:
    variables = spec["containers"][0]["env"]
    return {
        variable["name"]: placed(variable["value"], here) for variable in variables if "value" in variable
    }


def placed(word: str, here: dict[str, str]) -> str:
    for there, mine in here.items():
        word = word.replace(there, mine)
    return word


def merged(defaults: dict, values: dict) -> dict:
    """As Helm merges them."""
    result = copy.deepcopy(defaults)
    for key, value in values.items():
        inner = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if inner else value
    return result
