"""The drafts of the conformance suite are as good as they say."""

import pytest

from tests.support.tiny_drafts import STRENGTHS, spelling_draft, write_stranger
from tests.support.tiny_model import texts_of, write_spelling_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
PROMPT = 20  # tokens of a text that are not predicted


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_spelling_model(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("agreement", [1, *STRENGTHS])
def test_a_draft_agrees_as_often_as_it_says(target, tmp_path, agreement):
    from sglang_patches.demo.noise import agreement as measured

    texts = [(text[:PROMPT], text[PROMPT:]) for text in texts_of(target, 16, 120)]
    folders = target, spelling_draft(target, tmp_path, agreement)
    models = [transformers.LlamaForCausalLM.from_pretrained(folder) for folder in folders]
    assert measured(*models, texts) == pytest.approx(agreement, abs=0.03)


def test_a_stranger_has_the_same_tokens_by_other_numbers(target, tmp_path):
    own, other = (
        transformers.AutoTokenizer.from_pretrained(folder).get_vocab()
        for folder in (target, write_stranger(tmp_path))
    )
    assert own.keys() == other.keys()
    assert own != other
