"""Token ids cross between target and draft, so they must mean the same."""

from __future__ import annotations

from tokenizers import Tokenizer

from sglang_patches.tokenizer_file import tokenizer_file


def refuse_other_vocabulary(target: tuple[str, str | None], draft: tuple[str, str | None]) -> None:
    """Raises ValueError that names a token on which the two models' tokenizers differ. The arguments are the models' folders, or their
    names and revisions."""
    ours, theirs = (Tokenizer.from_file(str(tokenizer_file(*model))).get_vocab() for model in (target, draft))
    if ours != theirs:
        token, number = min(set(ours.items()) ^ set(theirs.items()), key=lambda item: (item[1], item[0]))
        raise ValueError(
            f"--speculative-draft-model-path {draft[0]}: its tokenizer is not the target's: token {number} is {token!r} in one of them"
            " only"
        )
