"""Reading a /metrics page."""

from __future__ import annotations

import requests
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sglang_patches.launch.processes import PROXIES

SECONDS = 60.0


def samples(url: str) -> list[Sample]:
    """All samples of the page `url`/metrics; raises requests.HTTPError."""
    response = requests.get(url + "/metrics", proxies=PROXIES, timeout=SECONDS)
    response.raise_for_status()
    return [sample for family in text_string_to_metric_families(response.text) for sample in family.samples]


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of its samples with these labels; 0 if there is none."""
    return sum(s.value for s in samples(url) if s.name == name and labels.items() <= s.labels.items())
