"""What a draft process is told, from SGLang's own resolution of the server's arguments."""

import argparse
import os
import sys

import pytest

pytest.importorskip("sglang")

from sglang.srt.arg_groups.overrides import resolved_view  # noqa: E402

from datastore_service.protocol.types import Namespace  # noqa: E402
from sglang_patches.draft_process import settings  # noqa: E402
from sglang_patches.draft_process.arguments import given_of  # noqa: E402
from sglang_patches.draft_process.settings import (  # noqa: E402
    DraftSettings,
    Gpus,  # noqa: E402
    draft_settings,
)
from sglang_patches.methods.registry import METHODS  # noqa: E402
from sglang_patches.options import Options  # noqa: E402
from tests.unit.plugin.resolution import resolve, server_args  # noqa: E402

pytestmark = pytest.mark.usefixtures("plugin")


class PretendedGpus(Gpus):
    """used: bytes in use on each, None where that cannot be told."""

    def __init__(self, used):
        self._used = used

    def count(self):
        return len(self._used)

    def bytes_in_use(self, index):
        if self._used[index] is None:
            raise RuntimeError("no NVML")
        return self._used[index]


def settings_of(path, device="", name="DOUBLE", replica=0, **given):
    given = {"speculative_algorithm": name, "speculative_draft_model_path": path} | given
    args = server_args(path, "hopper", **given)
    options, method, namespace = Options(draft_device=device), METHODS[name], Namespace("m", "f" * 64)
    return draft_settings(
        resolved_view(args), given_of(args), options, method, namespace, 4096, 1000, replica
    )


@pytest.mark.parametrize(
    ("device", "given", "expected", "serial"),
    [
        ("", {}, "cuda:1", False),
        ("", {"tp_size": 2}, "cuda:2", False),
        ("cuda:0", {}, "cuda:0", True),
        ("cuda", {}, "cuda:0", True),
        ("cuda:1", {"tp_size": 2}, "cuda:1", True),
        ("cuda:3", {"tp_size": 2}, "cuda:3", False),
        ("cuda:0", {"base_gpu_id": 1}, "cuda:0", False),
        ("cpu", {}, "cpu", False),
        ("", {"name": "DUO"}, "cpu", False),
        ("cuda:1", {"name": "DUO"}, "cuda:1", False),
    ],
)
def test_a_draft_model_on_a_device_of_the_target_gives_way(model_path, device, given, expected, serial):
    told = settings_of(model_path("dense"), device, **given)
    assert (told.device, told.serial) == (expected, serial)


@pytest.mark.parametrize(
    ("device", "replica", "given", "expected", "serial"),
    [
        ("", 0, {"dp_size": 2}, "cuda:2", False),
        ("", 1, {"dp_size": 2}, "cuda:3", False),
        ("", 1, {"dp_size": 2, "tp_size": 2, "base_gpu_id": 1}, "cuda:6", False),
        ("", 1, {"dp_size": 2, "gpu_id_step": 2}, "cuda:5", False),
        ("cuda:1", 1, {"dp_size": 2}, "cuda:1", True),
        ("cuda:1", 0, {"dp_size": 2}, "cuda:1", False),
        ("cuda:2", 1, {"dp_size": 2, "gpu_id_step": 2}, "cuda:2", True),
        ("cuda:1", 0, {"tp_size": 2, "gpu_id_step": 2}, "cuda:1", False),
    ],
)
def test_each_replica_has_a_draft_device_that_no_target_has(
    model_path, device, replica, given, expected, serial
):
    told = settings_of(model_path("dense"), device, replica=replica, **given)
    assert (told.device, told.serial) == (expected, serial)


@pytest.mark.parametrize(
    ("device", "gpus", "given", "reason"),
    [
        ("", 1, {}, "no GPU is left for the draft model, this process sees 1"),
        ("", 2, {"tp_size": 2}, "no GPU is left for the draft model, this process sees 2"),
        ("cuda:2", 2, {}, "cuda:2, but this process sees 2 GPUs"),
    ],
)
def test_a_device_that_the_host_does_not_have_is_refused(
    model_path, monkeypatch, device, gpus, given, reason
):
    monkeypatch.setattr(settings, "GPUS", PretendedGpus([0] * gpus))
    with pytest.raises(ValueError, match=reason):
        settings_of(model_path("dense"), device, **given)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_gpu_that_another_server_uses_is_no_free_one(model_path, monkeypatch, replicas):
    """Two servers on one host: what the second has on its GPU is seen by the first, before it loads anything."""
    idle, model = 600 << 20, 20 << 30
    path = model_path("dense")
    given = {"speculative_algorithm": "SAGUARO", "speculative_draft_model_path": path, "dp_size": replicas}
    monkeypatch.setattr(settings, "GPUS", PretendedGpus([model] * replicas + [idle] * replicas))
    resolve(path, "hopper", **given)
    monkeypatch.setattr(settings, "GPUS", PretendedGpus([idle] * (2 * replicas - 1) + [model]))
    taken = f"cuda:{2 * replicas - 1}"
    with pytest.raises(ValueError, match=rf"{taken} is in use \(20.0 GiB\): .*--specstore-draft-device"):
        resolve(path, "hopper", **given)
    monkeypatch.setenv("SPECSTORE_DRAFT_DEVICE", taken)  # who names it may know better
    resolve(path, "hopper", **given)


def test_a_gpu_of_which_nothing_is_known_has_to_be_named(model_path, monkeypatch):
    monkeypatch.setattr(settings, "GPUS", PretendedGpus([0, None]))
    reason = (
        r"cuda:1 may be another's, which this process cannot find out \(no NVML\): .*--specstore-draft-device"
    )
    with pytest.raises(ValueError, match=reason):
        settings_of(model_path("dense"))


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_one_gpu_is_enough_for_a_draft_model_that_gives_way_or_is_on_the_cpu(model_path, monkeypatch, device):
    monkeypatch.setattr(settings, "GPUS", PretendedGpus([0]))
    monkeypatch.setenv("SPECSTORE_DRAFT_DEVICE", device)  # the resolution reads it too
    assert settings_of(model_path("dense"), device).device == device


def test_a_prefill_instance_needs_no_gpu_for_a_draft_model(model_path, monkeypatch):
    monkeypatch.setattr(settings, "GPUS", PretendedGpus([0]))
    given = {"speculative_algorithm": "SAGUARO", "speculative_draft_model_path": model_path("dense")}
    resolve(model_path("dense"), "hopper", disaggregation_mode="prefill", **given)
    with pytest.raises(ValueError, match="no GPU is left for the draft model"):
        resolve(model_path("dense"), "hopper", disaggregation_mode="decode", **given)


def test_replicas_share_the_cores_of_draft_models(model_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    path = model_path("dense")
    assert [settings_of(path, "cpu", replica=replica, dp_size=2).cores for replica in (0, 1)] == [
        "4,5",
        "6,7",
    ]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert [settings_of(path, "cpu", replica=replica, dp_size=2).cores for replica in (0, 1)] == ["1", "1"]


def test_a_draft_model_on_the_cpu_of_a_host_with_a_gpu_has_half_of_the_cores(model_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 8, 9, 10, 11})
    assert settings_of(model_path("dense"), "cpu").cores == "8,9,10,11"
    assert settings_of(model_path("dense"), "cuda:1").cores == ""


def test_the_process_reads_what_it_is_told(model_path, monkeypatch):
    told = settings_of(model_path("dense"))
    monkeypatch.setattr(sys, "argv", ["process", *told.flags()])
    assert DraftSettings.parse(argparse.ArgumentParser()) == told
