"""What a draft process is told, from SGLang's own resolution of the server's arguments."""

import argparse
import sys

import pytest

pytest.importorskip("sglang")

from datastore_service.protocol.types import Namespace  # noqa: E402
from sglang_patches.drafting.process.settings import DraftSettings, draft_settings  # noqa: E402
from sglang_patches.options import Options  # noqa: E402
from tests.unit.plugin.resolution import resolve  # noqa: E402

pytestmark = pytest.mark.usefixtures("plugin")


def settings_of(path, device="", **given):
    view = resolve(path, "hopper", speculative_algorithm="DOUBLE", speculative_draft_model_path=path, **given)
    namespace = Namespace("m", "f" * 64)
    return draft_settings(view, Options(draft_device=device), "DOUBLE", namespace, 4096, 1000)


@pytest.mark.parametrize(
    ("device", "given", "expected", "serial"),
    [
        ("", {}, "cuda:1", False),
        ("", {"tp_size": 2}, "cuda:2", False),
        ("cuda:0", {}, "cuda:0", True),
        ("cuda:1", {"tp_size": 2}, "cuda:1", True),
        ("cuda:3", {"tp_size": 2}, "cuda:3", False),
        ("cuda:0", {"base_gpu_id": 1}, "cuda:0", False),
    ],
)
def test_a_draft_model_on_a_device_of_the_target_gives_way(model_path, device, given, expected, serial):
    settings = settings_of(model_path("dense"), device, **given)
    assert (settings.device, settings.serial) == (expected, serial)


def test_the_process_reads_what_it_is_told(model_path, monkeypatch):
    settings = settings_of(model_path("dense"))
    monkeypatch.setattr(sys, "argv", ["process", *settings.flags()])
    assert DraftSettings.parse(argparse.ArgumentParser()) == settings
