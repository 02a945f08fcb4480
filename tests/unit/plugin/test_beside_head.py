"""Retrieval beside a head, as SGLang's own resolution takes it: the operator's flags stay, the verified tree is wide enough for both, and
what cannot be united is refused by name."""

import re
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

from sglang_patches.host.versions import host  # noqa: E402
from sglang_patches.methods.registry import HEADS, METHODS  # noqa: E402
from tests.unit.plugin.resolution import resolve  # noqa: E402

pytestmark = pytest.mark.usefixtures("plugin")
united = pytest.mark.skipif(not host.HEADS, reason="this SGLang has no place for it")
HEADS_PAGE = Path(__file__).parents[3] / "docs/heads.md"
CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 24}
# Model, platform, and the attention backend that SGLang takes for the head alone: it verifies chains, and of some models trees.
CHAINED = [
    ("dense", "ampere", "flashinfer"),
    ("dense", "hopper", "fa3"),
    ("dense", "blackwell", "trtllm_mha"),
    ("sliding window", "hopper", "fa3"),
    ("attention sinks", "hopper", "fa3"),
    ("MLA", "blackwell", "trtllm_mla"),
    ("hybrid", "hopper", "fa3"),
]
# The backend of a head that drafts trees.
UNITED = [
    ("dense", "hopper", "flashinfer"),
    ("sliding window", "hopper", "triton"),
    ("attention sinks", "hopper", "triton"),
    ("MLA", "hopper", "fa3"),
    ("hybrid", "blackwell", "triton"),
]
# Settings of SGLang that a head may have, and what the refusal says.
REFUSED = [
    ({"speculative_use_rejection_sampling": True}, "--speculative-use-rejection-sampling True"),
    ({"speculative_accept_threshold_single": 0.5}, "--speculative-accept-threshold-single 0.5"),
    ({"speculative_accept_threshold_acc": 0.5}, "--speculative-accept-threshold-acc 0.5"),
    ({"speculative_adaptive": True}, "--speculative-adaptive True"),
    ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle True"),
    ({"enable_mixed_chunk": True}, "--enable-mixed-chunk True"),
    ({"speculative_use_block_verification": True}, "--speculative-use-block-verification True"),
    ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill"),
    ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
    ({"pp_size": 2}, "--pp-size 2"),
    ({"enable_dp_attention": True, "tp_size": 2, "dp_size": 2}, "--enable-dp-attention (--attn-dp-size)"),
    ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num 2"),
]


@pytest.fixture
def beside(monkeypatch, model_path):
    """Resolves a server of a head with retrieval beside it."""
    monkeypatch.setenv("SPECSTORE_BESIDE_HEAD", "on")

    def resolved(algorithm="EAGLE3", platform="hopper", model="dense", **given):
        path = model_path(model)
        given = CHAIN | {"speculative_draft_model_path": path} | given
        return resolve(path, platform, speculative_algorithm=algorithm, **given)

    return resolved


@united
@pytest.mark.parametrize("name", HEADS)
def test_the_operator_s_algorithm_stays(beside, name):
    view = beside(name)
    assert view.speculative_algorithm == ("EAGLE" if name == "NEXTN" else name)
    assert (view.speculative_num_steps, view.speculative_eagle_topk) == (3, 1)


@united
def test_a_step_has_room_for_what_either_drafts(beside, monkeypatch):
    assert beside().speculative_num_draft_tokens == 16
    assert beside(**TREE).speculative_num_draft_tokens == 24
    monkeypatch.setenv("SPECSTORE_NODES", "40")
    assert beside().speculative_num_draft_tokens == 41


@united
@pytest.mark.parametrize(("model", "platform", "backend"), CHAINED)
def test_a_head_that_drafts_chains_keeps_sglang_s_backend(beside, model, platform, backend):
    view = beside("EAGLE", platform, model)
    assert (view.attention_backend, view.speculative_eagle_topk) == (backend, 1)


@united
@pytest.mark.parametrize(("model", "platform", "backend"), UNITED)
def test_a_head_that_drafts_trees_gets_a_backend_that_verifies_them(beside, model, platform, backend):
    assert beside("EAGLE", platform, model, **TREE).attention_backend == backend


@united
def test_a_head_that_drafts_trees_needs_a_backend_that_verifies_them(beside):
    with pytest.raises(ValueError, match="--attention-backend torch_native cannot verify draft trees"):
        beside(attention_backend="torch_native", **TREE)
    assert beside(attention_backend="torch_native").attention_backend == "torch_native"  # chains will do


@united
@pytest.mark.parametrize(
    ("given", "said"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_cannot_be_united_is_refused(beside, given, said):
    refusal = re.escape(f"EAGLE3 with --specstore-beside-head: {said} is not supported")
    with pytest.raises(ValueError, match=refusal):
        beside(**given)


def others() -> list[str]:
    """SGLang's own algorithms that are no heads."""
    return [of.name for of in SpeculativeAlgorithm if of.name not in ("NONE", *HEADS)]


@united
def test_every_other_algorithm_of_sglang_is_told_in_docs():
    assert {"DFLASH", "DSPARK", "FROZEN_KV_MTP", "NGRAM", "UNO"} == set(others())
    rows = [line for line in HEADS_PAGE.read_text().splitlines() if "refused by name" in line]
    assert all(any(f"`{name}`" in row for row in rows) for name in others())


@pytest.mark.parametrize("name", others())
def test_other_algorithms_of_sglang_are_refused(beside, name):
    with pytest.raises(ValueError, match=f"--specstore-beside-head: --speculative-algorithm {name} is not"):
        beside(name)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "MIRROR"])
def test_specstore_s_methods_have_no_head(beside, model_path, name):
    with pytest.raises(ValueError, match=f"{name}: --specstore-beside-head is for EAGLE, NEXTN, EAGLE3"):
        beside(name)


@united
def test_without_the_flag_nothing_changes(model_path):
    path = model_path("dense")
    given = CHAIN | {"speculative_draft_model_path": path}
    view = resolve(path, "hopper", speculative_algorithm="EAGLE3", **given)
    assert view.speculative_num_draft_tokens == 4


def test_a_version_without_the_seams_is_refused(beside, monkeypatch):
    monkeypatch.setattr(host, "HEADS", False)
    with pytest.raises(ValueError, match=r"--specstore-beside-head: SGLang [\d.]+ has no place for it"):
        beside()
