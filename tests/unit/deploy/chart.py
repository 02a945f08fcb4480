"""The Helm chart, rendered by Helm."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.unit.deploy.exported import CHECKOUT

CHART = CHECKOUT / "deploy" / "helm" / "specstore"
NAMESPACE = "ml"
EVERYTHING = {
    "image": {"repository": "registry.example/specstore", "tag": "1", "pullSecrets": [{"name": "pull"}]},
    "replicas": 3,
    "adminToken": {"secretName": "mine", "key": "admin"},
    "tls": {
        "secretName": "specstore-tls",
        "clientCertificates": True,
        "issuer": {"name": "ca", "kind": "ClusterIssuer"},
    },
    "identities": {"secretName": "specstore-identities"},
    "persistence": {"size": "200Gi", "storageClassName": "fast", "encryptionSecretName": "keys"},
    "prior": {"claimName": "prior", "tenants": {"a customer": "customers/a"}},
    "share": {
        "url": "valkeys://specstore@valkey.example:6379/1",
        "password": {"secretName": "valkey", "key": "password"},
        "caSecretName": "valkey-ca",
        "clientSecretName": "valkey-client",
    },
    "options": {
        "vocabSize": 2147483648,
        "namespaces": 4,
        "sessions": 100,
        "tokens": 67108864,
        "liveTokens": 0,
        "conversationSeconds": 60.5,
        "refusals": 64,
        "workspaceTokens": 1000000,
        "fusion": "priority",
        "grace": 30,
        "streams": 16,
        "logLevel": "warning",
    },
    "metrics": {
        "serviceMonitor": {"enabled": True, "interval": "15s", "labels": {"release": "prometheus"}},
        "prometheusRule": {
            "enabled": True,
            "labels": {"release": "prometheus"},
            "runbook": "https://wiki.example/runbook",
        },
        "dashboard": {"enabled": True, "labels": {"grafana_dashboard": "1"}},
    },
    "networkPolicy": {
        "engines": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "sglang"}}}],
        "egress": [{"to": [{"podSelector": {}}], "ports": [{"port": 4317}]}],
    },
    "env": [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4317"}],
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "datastore", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
}


def helm(*words: object) -> subprocess.CompletedProcess[str]:
    program = shutil.which("helm")
    if program is None:
        pytest.skip("needs helm")
    return subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=60)


def values_file(folder: Path, values: dict) -> Path:
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def render(folder: Path, values: dict) -> list[dict]:
    """The manifests for these values; fails the test if there are none."""
    done = helm(
        "template", "specstore", CHART, "--namespace", NAMESPACE, "--values", values_file(folder, values)
    )
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def pod(manifests: list[dict]) -> dict:
    (found,) = [manifest for manifest in manifests if manifest["kind"] == "StatefulSet"]
    return found["spec"]["template"]["spec"]
