"""The command of a server, on a CPU and on a GPU."""

import pytest

pytest.importorskip("sglang")

from tests.support.servers import engine  # noqa: E402


@pytest.mark.parametrize(
    ("name", "shares"), [("SAGUARO", True), ("DUO", False), ("STANDALONE", False), ("SSSD", False)]
)
def test_on_a_gpu_the_draft_model_shares_it_unless_the_method_has_it_on_the_cpu(
    monkeypatch, tmp_path, name, shares
):
    monkeypatch.setattr(engine, "DEVICE", "cuda")
    draft = None if name == "SSSD" else tmp_path
    words = engine.ServerSpec("one", tmp_path, name, draft=draft).command(1234)
    assert words[words.index("--device") + 1] == "cuda"
    assert "--attention-backend" not in words and "--sampling-backend" not in words  # SGLang's own
    assert ("--specstore-draft-device" in words) == shares


def test_on_a_cpu_it_has_the_backends_of_a_cpu(tmp_path):
    words = engine.ServerSpec("one", tmp_path, "SAGUARO", draft=tmp_path).command(1234)
    for flag, value in [("--device", "cpu"), ("--attention-backend", "specstore_cpu")]:
        assert words[words.index(flag) + 1] == value
    assert "--specstore-draft-device" not in words
