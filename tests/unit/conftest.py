"""The plugin, registered in this process as SGLang registers it, and what resolution leaves behind put back."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def plugin():
    pytest.importorskip("sglang")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def model_path(tmp_path):
    from tests.unit.plugin.resolution import write_model

    return lambda name: write_model(tmp_path / name.replace(" ", "-"), name)
