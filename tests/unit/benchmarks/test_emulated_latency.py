"""What the emulated target latency slows, and that it refuses a value that it cannot use."""

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks.emulated_latency import PLUGIN, AdjustableLatency, emulated_latency


@pytest.fixture(scope="module")
def plugin():
    spec = importlib.util.spec_from_file_location("emulated", PLUGIN / "specstore_emulated_latency.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batch(kind: str) -> SimpleNamespace:
    modes = SimpleNamespace(is_decode=lambda: kind == "decode", is_target_verify=lambda: kind == "verify")
    return SimpleNamespace(forward_mode=modes)


@pytest.mark.parametrize(("kind", "slept"), [("decode", 1), ("verify", 1), ("extend", 0)])
def test_prefill_is_not_slowed(plugin, monkeypatch, kind, slept):
    sleeps = []
    monkeypatch.setattr(plugin.time, "sleep", sleeps.append)
    monkeypatch.setattr(plugin.time, "monotonic", lambda: 100.0)
    slow = plugin.Pace(lambda: 1.0).whole(lambda forward_batch, flag=False: (forward_batch, flag))
    given = batch(kind)
    assert slow(given, flag=True) == (given, True)
    assert sleeps == [1.0] * slept


def test_each_layer_ends_at_its_share_of_the_time(plugin, monkeypatch):
    clock, ends = [100.0], []
    monkeypatch.setattr(plugin.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(plugin.time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    pace = plugin.Pace(lambda: 1.0)

    def layer(seconds):
        clock[0] += seconds
        return seconds

    layers = [pace.part(layer, share) for share in (0.25, 0.5, 0.75, 1.0)]

    def forward(forward_batch):
        for seconds, slow in zip((0.1, 0.1, 0.3, 0.1), layers, strict=True):
            assert slow(seconds) == seconds
            ends.append(round(clock[0] - 100.0, 6))

    pace.whole(forward)(batch("verify"))
    assert ends == [0.25, 0.5, 0.8, 1.0], "one that is late delays nothing but itself"
    ends.clear()
    clock[0] = 100.0
    pace.whole(forward)(batch("extend"))
    assert ends == [0.1, 0.2, 0.5, 0.6]


def test_a_draft_is_not_slowed(plugin):
    def forward():
        raise NotImplementedError

    for draft in (True, False):
        model = SimpleNamespace(model=SimpleNamespace(layers=[]))
        runner = SimpleNamespace(device="cpu", forward=forward, model=model)
        plugin.slow_down(SimpleNamespace(is_draft_worker=draft, model_runner=runner), lambda: 1.0, "1 s")
        assert (runner.forward is forward) == draft


@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf", "slow", ""])
def test_a_value_that_cannot_be_used_ends_the_process(value):
    """As SGLang loads plugins: it survives their exceptions."""
    variables = emulated_latency(1) | {"SPECSTORE_EMULATED_LATENCY_MS": value}
    code = """
import specstore_emulated_latency
try:
    specstore_emulated_latency.register()
except Exception:
    pass
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert f"SPECSTORE_EMULATED_LATENCY_MS={value!r}: give a number" in done.stderr


def test_the_latency_of_a_running_server_can_be_changed(plugin, monkeypatch, tmp_path):
    latency, sleeps = AdjustableLatency(tmp_path / "latency"), []
    for name, value in latency.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(plugin.time, "sleep", sleeps.append)
    monkeypatch.setattr(plugin.time, "monotonic", lambda: 100.0)
    slow = plugin.Pace(plugin.latency()[0]).whole(lambda forward_batch: forward_batch)
    for milliseconds in (0, 2000, 500):
        latency.set(milliseconds)
        slow(batch("decode"))
    assert sleeps == [2.0, 0.5]


@pytest.mark.parametrize("text", ["-1", "nan", "soon", None])
def test_a_file_without_a_latency_ends_the_process(plugin, monkeypatch, tmp_path, text):
    file = tmp_path / "latency"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("SPECSTORE_EMULATED_LATENCY_FILE", str(file))
    with pytest.raises(SystemExit, match="SPECSTORE_EMULATED_LATENCY_FILE: "):
        plugin.latency()
