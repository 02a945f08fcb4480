"""Settings that the algorithms cannot work with stop the start, by name: SGLang's own resolution is asked."""

from pathlib import Path

import pytest
from packaging.version import Version

pytest.importorskip("sglang")

from sglang_patches.algorithm import _ONLY_SUPPORTED, _REFUSED, _WITHOUT_EFFECT, _flag  # noqa: E402
from sglang_patches.drafting.registry import METHODS  # noqa: E402
from sglang_patches.versions import INSTALLED, host  # noqa: E402
from tests.unit.plugin.resolution import resolve  # noqa: E402

pytestmark = pytest.mark.usefixtures("plugin")

# Arguments that not every version has, by the first that has them.
SINCE = {
    "0.5.21": [({"enable_pd_role_switch": True}, "--enable-pd-role-switch")],
    "0.5.22": [
        ({"tp_size": 2, "attn_dp_size": 2}, r"--enable-dp-attention \(--attn-dp-size\)"),
        ({"enable_watermark": True}, "--enable-watermark"),
    ],
}
HERE = [method for method in METHODS.values() if host.EARLY_EXITS or not method.early_exit]


def test_what_it_can_work_with_passes(model_path):
    view = resolve(model_path("dense"), "hopper")
    assert view.speculative_num_draft_tokens == 16
    assert view.speculative_num_steps * view.speculative_eagle_topk <= 16


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"speculative_num_draft_tokens": 3}, "--speculative-num-draft-tokens 3"),
        ({"speculative_num_steps": 3}, "--speculative-num-steps 3"),
        ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk 4"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, "--enable-dp-attention"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"grammar_backend": "outlines"}, "--grammar-backend outlines"),
        ({"enable_streaming_session": True}, "--enable-streaming-session"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num 2"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"tp_size": 2, "attn_cp_size": 2}, "--attn-cp-size 2"),
        ({"enable_mixed_chunk": True}, "--enable-mixed-chunk"),
        ({"enable_return_routed_experts": True}, "--enable-return-routed-experts"),
        ({"enable_return_indexer_topk": True}, "--enable-return-indexer-topk"),
        ({"speculative_accept_threshold_single": 0.5}, "--speculative-accept-threshold-single 0.5"),
        ({"speculative_accept_threshold_acc": 0.5}, "--speculative-accept-threshold-acc 0.5"),
        ({"speculative_use_rejection_sampling": True}, "--speculative-use-rejection-sampling"),
        ({"speculative_token_map": "tokens.pt"}, "--speculative-token-map tokens.pt"),
        *(case for first, cases in SINCE.items() if Version(INSTALLED) >= Version(first) for case in cases),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_it_cannot_work_with_is_named(model_path, given, flag):
    with pytest.raises(ValueError, match=f"^(SSSD: )?{flag}"):
        resolve(model_path("dense"), "hopper", **given)


def test_each_refused_setting_is_in_the_docs():
    refused = {*_ONLY_SUPPORTED, *_WITHOUT_EFFECT, *host.ONLY_SUPPORTED, *_REFUSED}
    page = (Path(__file__).parents[3] / "docs" / "settings.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("|") and "refused" in row]
    assert not {_flag(field) for field in refused if not any(_flag(field) in row for row in rows)}


@pytest.mark.parametrize(
    "name", [method.name for method in HERE if method.draft_process and method.needs_draft_model]
)
def test_a_method_with_a_draft_process_needs_a_draft_model(model_path, name, monkeypatch):
    monkeypatch.setenv("SPECSTORE_EARLY_EXIT", "exits.safetensors")
    path = model_path("dense")
    missing = f"{name}: --speculative-draft-model-path is missing; SSSD drafts without a model"
    with pytest.raises(ValueError, match=missing):
        resolve(path, "hopper", speculative_algorithm=name)
    given = {"speculative_algorithm": name, "speculative_draft_model_path": path}
    assert resolve(path, "hopper", **given).speculative_draft_model_path == path


@pytest.mark.parametrize("name", [method.name for method in METHODS.values() if method.early_exit])
def test_a_method_with_an_early_exit_is_refused_where_sglang_hands_out_no_states(
    model_path, name, monkeypatch
):
    monkeypatch.setattr(host, "EARLY_EXITS", False)  # as it is before 0.5.22
    monkeypatch.setenv("SPECSTORE_EARLY_EXIT", "exits.safetensors")
    path = model_path("dense")
    with pytest.raises(ValueError, match=rf"{name}: SGLang [\d.]+ hands out no hidden states"):
        resolve(path, "hopper", speculative_algorithm=name, speculative_draft_model_path=path)


@pytest.mark.parametrize("name", [method.name for method in HERE if method.early_exit])
def test_a_method_with_an_early_exit_needs_its_file(model_path, name):
    given = {"speculative_algorithm": name, "speculative_draft_model_path": model_path("dense")}
    with pytest.raises(ValueError, match=f"{name}: --specstore-early-exit is missing"):
        resolve(model_path("dense"), "hopper", **given)


def test_a_draft_device_that_the_target_s_host_has_not_is_refused(model_path, monkeypatch):
    given = {"speculative_algorithm": "SAGUARO", "speculative_draft_model_path": model_path("dense")}
    monkeypatch.setenv("SPECSTORE_DRAFT_DEVICE", "cuda:1")
    with pytest.raises(ValueError, match="draft_device: cuda:1 with a target on cpu"):
        resolve(model_path("dense"), "hopper", device="cpu", **given)


def test_hybrid_models_whose_layers_follow_no_tree_are_refused(model_path):
    with pytest.raises(ValueError, match="SSSD: the linear-attention layers of this model cannot verify"):
        resolve(model_path("lightning"), "hopper")


def test_hybrid_models_are_refused_on_a_cpu(model_path):
    with pytest.raises(ValueError, match="SSSD: there are no CPU kernels for the linear-attention layers"):
        resolve(model_path("hybrid"), "hopper", device="cpu")


def test_draft_model_is_refused(model_path):
    path = model_path("dense")
    with pytest.raises(ValueError, match="--speculative-draft-model-path"):
        resolve(path, "hopper", speculative_draft_model_path=path)


def test_replicas_are_not_data_parallel_attention(model_path):
    assert resolve(model_path("dense"), "hopper", dp_size=2).dp_size == 2
