"""What a method needs and a model cannot have stops the start, by name: SGLang's own resolution is asked. `test_settings` asks it for
each setting that is refused."""

import pytest

pytest.importorskip("sglang")

from sglang_patches.host.versions import host  # noqa: E402
from sglang_patches.methods.registry import METHODS  # noqa: E402
from tests.unit.plugin.resolution import resolve  # noqa: E402

pytestmark = pytest.mark.usefixtures("plugin")

HERE = [method for method in METHODS.values() if host.EARLY_EXITS or not method.early_exit]


def test_what_it_can_work_with_passes(model_path):
    view = resolve(model_path("dense"), "hopper")
    assert view.speculative_num_draft_tokens == 16
    assert view.speculative_num_steps * view.speculative_eagle_topk <= 16


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
    monkeypatch.setattr(host, "EARLY_EXITS", False)  # as it is on 0.5.17
    monkeypatch.setenv("SPECSTORE_EARLY_EXIT", "exits.safetensors")
    path = model_path("dense")
    with pytest.raises(ValueError, match=rf"{name}: SGLang [\d.]+ hands out no hidden states"):
        resolve(path, "hopper", speculative_algorithm=name, speculative_draft_model_path=path)


@pytest.mark.skipif(not host.EARLY_EXITS, reason="SGLang 0.5.17 hands out no hidden states")
@pytest.mark.parametrize("name", [method.name for method in METHODS.values() if method.early_exit])
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
