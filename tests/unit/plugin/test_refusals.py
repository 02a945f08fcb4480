"""Settings that the algorithms cannot work with stop the start, by name."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang_patches import algorithm  # noqa: E402

FINE = {
    "speculative_num_draft_tokens": None,
    "pp_size": 1,
    "enable_dp_attention": False,
    "enable_watermark": False,
    "speculative_adaptive": False,
    "speculative_draft_model_path": None,
    "enable_pd_role_switch": False,
}


@pytest.fixture(autouse=True)
def settings_as_given(monkeypatch):
    monkeypatch.setattr(algorithm, "resolving_view", lambda server_args: server_args)


def test_what_it_can_work_with_passes():
    algorithm.refuse_unsupported("SSSD", SimpleNamespace(**FINE))


@pytest.mark.parametrize(
    ("setting", "value", "flag"),
    [
        ("speculative_num_draft_tokens", 3, "--speculative-num-draft-tokens 3"),
        ("pp_size", 2, "--pp-size 2"),
        ("enable_dp_attention", True, "--enable-dp-attention"),
        ("enable_watermark", True, "--enable-watermark"),
        ("speculative_adaptive", True, "--speculative-adaptive"),
        ("speculative_draft_model_path", "m", "--speculative-draft-model-path"),
        ("enable_pd_role_switch", True, "--enable-pd-role-switch"),
    ],
)
def test_what_it_cannot_work_with_is_named(setting, value, flag):
    with pytest.raises(ValueError, match=flag):
        algorithm.refuse_unsupported("SSSD", SimpleNamespace(**(FINE | {setting: value})))
