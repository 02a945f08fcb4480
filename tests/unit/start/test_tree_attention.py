"""Which attention backend a server gets, for each card and kind of model: SGLang's own resolution is asked."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang.srt.arg_groups.overrides import attention_backends_of  # noqa: E402

from sglang_patches.start import tree_attention  # noqa: E402
from sglang_patches.start.tree_attention import ModelTraits, why_unfit  # noqa: E402
from tests.unit.plugin.resolution import MODELS, PLATFORMS, resolve  # noqa: E402

pytestmark = pytest.mark.usefixtures("plugin")
PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"


def _documented() -> dict[tuple[str, str], str]:
    """(model, platform) -> backend, from the table in docs/compatibility.md."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()]
    head = next(row for row in rows if row and row[0] == "model")
    platforms = [name.lower() for name in head[1:]]
    table = [row for row in rows if row and row[0] in MODELS]
    return {
        (row[0], name): cell.strip("`")
        for row in table
        for name, cell in zip(platforms, row[1:], strict=True)
    }


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("model", MODELS)
def test_backend_that_sglang_would_not_verify_trees_with_is_replaced(model_path, model, platform):
    view = resolve(model_path(model), platform)
    prefill, _ = attention_backends_of(view)
    traits = ModelTraits(
        mla=model == "MLA",
        sliding_window=model in ("sliding window", "attention sinks"),
        attention_sinks=model == "attention sinks",
    )
    assert why_unfit(prefill, traits, view.page_size) is None
    assert view.page_size == 1  # also where SGLang's own choice would have made it 64
    assert view.speculative_eagle_topk > 1
    assert _documented()[model, platform] == prefill


@pytest.mark.parametrize(
    ("model", "platform", "given", "named"),
    [
        ("dense", "blackwell", {"attention_backend": "trtllm_mha"}, "--attention-backend trtllm_mha"),
        ("dense", "hopper", {"attention_backend": "fa3", "page_size": 16}, "--page-size 1, not 16"),
        ("MLA", "hopper", {"attention_backend": "flashinfer"}, "--attention-backend flashinfer"),
        ("MLA", "hopper", {"attention_backend": "flashmla"}, "--attention-backend flashmla"),
        ("sliding window", "ampere", {"attention_backend": "flashinfer"}, "--attention-backend flashinfer"),
        ("attention sinks", "hopper", {"attention_backend": "fa3"}, "--attention-backend fa3"),
        ("dense", "ampere", {"prefill_attention_backend": "torch_native"}, "--prefill-attention-backend"),
        (
            "dense",
            "blackwell",
            {"decode_attention_backend": "trtllm_mha", "speculative_attention_mode": "decode"},
            "--decode-attention-backend trtllm_mha",
        ),
    ],
)
def test_wrong_backend_that_the_user_named_is_refused_by_name(model_path, model, platform, given, named):
    with pytest.raises(ValueError, match=named):
        resolve(model_path(model), platform, **given)


def test_backend_that_does_not_verify_may_be_any(model_path):
    view = resolve(model_path("dense"), "blackwell", decode_attention_backend="trtllm_mha")
    assert attention_backends_of(view)[1] == "trtllm_mha"


def test_page_size_that_the_user_gave_is_kept(model_path):
    view = resolve(model_path("dense"), "hopper", page_size=16)
    assert (attention_backends_of(view)[0], view.page_size) == ("triton", 16)


def test_steps_and_branches_fit_into_every_width(model_path, monkeypatch):
    path = model_path("dense")
    for nodes in (1, 2, 3, 14, 15, 63):
        monkeypatch.setenv("SPECSTORE_NODES", str(nodes))
        view = resolve(path, "hopper")
        assert view.speculative_num_draft_tokens == nodes + 1
        assert view.speculative_eagle_topk * view.speculative_num_steps <= nodes + 1


class Loaded:
    """What is asked of a loaded model."""

    page_size, use_mla_backend = 1, False

    def __init__(self, window):
        self.sliding_window_size = window
        self.model_config = SimpleNamespace(attention_chunk_size=None, has_attention_sinks=False)


@pytest.mark.parametrize(
    ("backend", "window", "chains", "refused"),
    [
        ("triton", None, False, False),
        ("triton", 128, True, False),
        ("flashinfer", -1, False, False),
        ("flashinfer", 128, False, True),
        ("fa3", 128, False, False),
    ],
)
def test_window_that_the_configuration_does_not_tell(monkeypatch, backend, window, chains, refused):
    monkeypatch.setattr(tree_attention, "verifying_backend", lambda: backend)
    assert tree_attention.verifies_chains_only(Loaded(window)) is chains
    if refused:
        with pytest.raises(RuntimeError, match=f"attention backend {backend}"):
            tree_attention.refuse_unfit(Loaded(window))
    else:
        tree_attention.refuse_unfit(Loaded(window))
