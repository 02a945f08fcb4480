import pytest

from sglang_patches.host.versions import host


@pytest.fixture
def grammars_on_a_cpu(monkeypatch):
    """SGLang 0.5.17 has none: the plugin's hooks, without the plugin."""
    for path, hook in host.CPU_HOOKS.items():
        if path.startswith("sglang.srt.constrained."):
            monkeypatch.setattr(path, _called(hook))


def _called(hook):
    return lambda *arguments, **named: hook(None, *arguments, **named)
