"""What the draft model can take of a text. Its context may be shorter than the target's, and it may have fewer tokens; those that both
have must mean the same."""

from __future__ import annotations

import logging

from prometheus_client import Counter
from tokenizers import Tokenizer

from sglang_patches.draft_side.draft import Draft
from sglang_patches.namespace import tokenizer_file

logger = logging.getLogger(__name__)

NOT_TAKEN = Counter(
    "specstore_draft_not_taken",
    "Sessions that get no more drafts from the draft model: their text is too long for it (length), or has a token that it does not have (token)",
    ["reason"],
)
REFUSED = -1  # instead of a number of tokens
_LOG_LINES = {
    "length": "specstore: a text has more than the %d tokens that the draft model drafts after: it gets no more drafts from it",
    "token": "specstore: a text has a token that is not among the draft model's %d: it gets no drafts from it",
}


class Limits:
    """Tells which texts the draft model can run. A text that was refused once stays refused: it only grows.

    longest: most tokens of a text.
    vocabulary: number of the draft model's token ids, which may be another one than the target's. Token ids from it on have no
        embedding.
    """

    def __init__(self, longest: int, vocabulary: int) -> None:
        self._bounds = {"length": longest, "token": vocabulary}
        # Tokens of its text that were looked at, REFUSED once it was refused.
        self._seen: dict[Draft, int] = {}
        self._told: set[str] = set()

    def take(self, draft: Draft) -> bool:
        """Whether the model can run all of the session's text. Counts a session that it refuses at first sight, and logs the first for
        each reason. One that is refused later is opened again."""
        seen = self._seen.get(draft, 0)
        if seen in (REFUSED, draft.text.length):
            return seen != REFUSED
        reason = self._fault(draft, seen)
        if reason and draft not in self._seen:
            self._tell(reason)
        self._seen[draft] = REFUSED if reason else draft.text.length
        return not reason

    def close(self, draft: Draft) -> None:
        self._seen.pop(draft, None)

    def embedded(self, token: int) -> int:
        """The token, or one that the model has in its place. For tokens of a trie: nobody but the next draft depends on them."""
        return min(token, self._bounds["token"] - 1)

    def _fault(self, draft: Draft, seen: int) -> str:
        """The reason to refuse the text, "" for none. seen: leading tokens that are known to be fit."""
        if draft.text.length > self._bounds["length"]:
            return "length"
        return "token" if draft.text.after(seen).max(initial=0) >= self._bounds["token"] else ""

    def _tell(self, reason: str) -> None:
        NOT_TAKEN.labels(reason).inc()
        if reason not in self._told:
            self._told.add(reason)
            logger.warning(_LOG_LINES[reason], self._bounds[reason])


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
