from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

WORDS = ["[UNK]", *"abcdefghij"]


@pytest.fixture
def tokenizer_folder(tmp_path):
    """A tokenizer folder; words a to j have the ids 1 to 10."""
    return write_tokenizer(tmp_path / "tokenizer", WORDS)


def write_tokenizer(folder, words):
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
