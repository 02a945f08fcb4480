"""SmolLM2's tokenizer, rebuilt from the vocabulary and merges that its GGUF file carries.

GGUF stores the pre-tokenizer as a name only (`smollm`), and the generic GGUF conversion replaces it by plain
byte-level splitting. SmolLM2 was trained with digits split one by one first; its merges hold no ASCII digit, so the
difference shows in other scripts' digits, which would merge with the space before them.
"""

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .folder import DemoModelError

END_OF_TURN = "<|im_end|>"
START_OF_TURN = "<|im_start|>"
END_OF_TEXT = "<|endoftext|>"

SAMPLES = (
    "Hello, world! Don't merge   spaces.",
    "In 2024 the price rose 13.75% to $1,234,567.",
    'def f(x):\n\treturn {"k": [x, 0x1F]}\n',
    "Zwölf Boxkämpfer, 日本語, emoji 🙂, and a tab\tat the end\n\n",
)


def rebuild(gguf: GGUFReader, context_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer with its trained pre-tokenizer, special tokens at their ids, and the chat template."""
    tokens = gguf.fields["tokenizer.ggml.tokens"].contents()
    kinds = gguf.fields["tokenizer.ggml.token_type"].contents()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(gguf, tokens, special),
        bos_token=START_OF_TURN,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TURN,
        unk_token=END_OF_TEXT,
        additional_special_tokens=[t for t in special if t not in (START_OF_TURN, END_OF_TURN, END_OF_TEXT)],
        clean_up_tokenization_spaces=False,
        model_max_length=context_length,
    )
    tokenizer.chat_template = gguf.fields["tokenizer.chat_template"].contents()
    return tokenizer


def _byte_level_bpe(gguf: GGUFReader, tokens: list[str], special: list[str]) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in gguf.fields["tokenizer.ggml.merges"].contents()]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return core


def check(tokenizer: PreTrainedTokenizerFast, gguf: GGUFReader) -> None:
    """Raises `DemoModelError` unless texts survive a round trip, digits stand alone and special tokens keep their ids."""
    for text in SAMPLES:
        ids = tokenizer(text)["input_ids"]
        _require(tokenizer.decode(ids) == text, f"round trip changed {text!r}")
    digits = tokenizer.tokenize("90 \u0663")
    _require(digits == ["9", "0", "Ġ", "Ù", "£"], f"digits are not split one by one: {digits}")
    _check_special_tokens(tokenizer, gguf)
    _check_chat_template(tokenizer)


def _check_special_tokens(tokenizer: PreTrainedTokenizerFast, gguf: GGUFReader) -> None:
    tokens = gguf.fields["tokenizer.ggml.tokens"].contents()
    _require(len(tokenizer) == len(tokens), f"{len(tokenizer)} tokens, the GGUF file has {len(tokens)}")
    for token in tokenizer.all_special_tokens:
        ids = tokenizer(token)["input_ids"]
        _require(ids == [tokens.index(token)], f"{token} encodes to {ids}")
    eos = gguf.fields["tokenizer.ggml.eos_token_id"].contents()
    _require(tokenizer.eos_token_id == eos, f"end of sequence is {tokenizer.eos_token_id}, not {eos}")


def _check_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    expected = f"{START_OF_TURN}user\nHi{END_OF_TURN}\n{START_OF_TURN}assistant\n"
    _require(text.startswith(f"{START_OF_TURN}system\n"), "the default system prompt is missing")
    _require(text.endswith(expected), f"chat template rendered {text!r}")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise DemoModelError(f"tokenizer: {problem}")
