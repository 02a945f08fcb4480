"""Groups are sessions that answer one prompt, as in rollouts for reinforcement learning: siblings draft for each other while they are written.

Step by step a sibling's output is copied to a text that the sessions of its group search, all but its own, which searches the original.
The text stays when its session ends, and goes with the group when the last of its sessions ends. All texts of an engine together take
about MOST_BYTES at most, and a group has at most MOST_TEXTS. For one more the oldest text of an ended session leaves; where there is
none, a session adds no more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from datastore_service.engine.session import LONGEST_GRAM, NOBODY, SEPARATOR, SessionIndex

MOST_BYTES = 1 << 26  # of an engine's groups
MOST_TEXTS = 32  # of a group: its sessions look into each in every step
LEAST_CAPACITY = 512  # tokens of a text


class SiblingText(SessionIndex):
    """Output of one session that others read while it grows. Where nothing is written yet they read the end of a document."""

    __slots__ = ("began",)

    def __init__(self, capacity: int, owner: int) -> None:
        super().__init__(capacity)
        self._buffer[:capacity] = SEPARATOR
        self.owner = owner
        self.began = time.time()

    def takes(self, tokens: int) -> bool:
        """Whether so many more fit, with an end behind them."""
        return self.has_room(tokens + 1)


@dataclass(slots=True, eq=False)
class Sibling:
    """A session's part in its group.

    owner: address of the session's index.
    prompt_length: leading tokens of the session's text that are no output.
    written: leading tokens of the session's text that need not be written any more: n-grams want the last of the prompt.
    text: what is written, None before that.
    left: the session has ended."""

    group: str
    owner: int
    prompt_length: int
    written: int
    text: SiblingText | None = None
    left: bool = False


class Groups:
    """Every method may be called from any thread; `texts` waits for no other.

    changed: called when steps must look for `texts` again. Called under a lock that `texts` does not take."""

    def __init__(self, changed: Callable[[], None], most_bytes: int = MOST_BYTES) -> None:
        self._changed, self._most_bytes = changed, most_bytes
        self._lock = threading.Lock()
        self._siblings: dict[str, set[Sibling]] = {}  # of open sessions, by group
        self._texts: dict[str, tuple[SiblingText, ...]] = {}  # by group, newest first
        self._ended: dict[SiblingText, str] = {}  # of ended sessions, with their groups, oldest first

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, name: str) -> bool:
        return name in self._texts

    @property
    def nbytes(self) -> int:
        return sum(text.nbytes for text in chain.from_iterable(list(self._texts.values())))

    def texts(self, name: str) -> tuple[SiblingText, ...]:
        """What sessions of the group search, newest first."""
        return self._texts.get(name, ())

    def join(self, name: str, owner: int, prompt_length: int) -> Sibling:
        """Begins an open session's part. owner: address of its index."""
        sibling = Sibling(name, owner, prompt_length, max(0, prompt_length - LONGEST_GRAM))
        with self._lock:
            self._siblings.setdefault(name, set()).add(sibling)
        return sibling

    def write(self, sibling: Sibling, text: np.ndarray) -> None:
        """Writes what is new of an open session's text, int32. Two calls for one session are never at the same time."""
        new = text[sibling.written :]
        if len(text) <= sibling.prompt_length or not len(new):
            return
        written = sibling.text
        if written is None or not written.takes(len(new)):
            written = self._enlarged(sibling, len(new))
        if written is not None:
            written.append(new)
            sibling.written = len(text)

    def leave(self, sibling: Sibling, *, keeps_text: bool) -> None:
        """Ends a session's part, and the group with the last one. keeps_text: what it has written stays for its siblings."""
        group = sibling.group
        with self._lock:
            sibling.left = True
            self._siblings[group].discard(sibling)
            if not self._siblings[group]:
                del self._siblings[group]
                for text in self.texts(group):
                    self._remove(text, group)
            elif sibling.text is not None and keeps_text:
                sibling.text.owner = NOBODY  # another session's index may come to its address
                self._ended[sibling.text] = group
                self._changed()
            elif sibling.text is not None:
                self._remove(sibling.text, group)

    def expire(self, before: float) -> None:
        """Forgets the texts of ended sessions that began before a time, in seconds since 1970."""
        with self._lock:
            for text, group in [each for each in self._ended.items() if each[0].began < before]:
                self._remove(text, group)

    def clear(self) -> None:
        """Forgets all texts. Open sessions write what follows."""
        with self._lock:
            for sibling in chain.from_iterable(self._siblings.values()):
                sibling.text = None
            self._texts, self._ended = {}, {}
            self._changed()

    def _enlarged(self, sibling: Sibling, extra: int) -> SiblingText | None:
        """A text with room for so many more tokens, in place of the session's. None if there is no room for it, or if the session's was
        forgotten meanwhile."""
        old = sibling.text
        known = 0 if old is None else len(old)
        text = SiblingText(max(LEAST_CAPACITY, 2 * (known + extra)), sibling.owner)
        with self._lock:
            if not self._make_room(sibling, text.nbytes):
                return None
        if old is not None:
            text.append(old.tokens)  # a kernel, so under no lock
        with self._lock:
            if sibling.left or sibling.text is not old:
                return None
            others = tuple(other for other in self.texts(sibling.group) if other is not old)
            self._show(sibling.group, (text, *others))
            sibling.text = text
        return text

    def _make_room(self, sibling: Sibling, nbytes: int) -> bool:
        """Whether a text of that size fits, once texts of ended sessions have left for it. Called under the lock."""
        over = self.nbytes + nbytes - self._most_bytes
        while over > 0 and self._ended:
            text, group = next(iter(self._ended.items()))
            self._remove(text, group)
            over -= text.nbytes
        siblings = self.texts(sibling.group)
        if sibling.text is None and len(siblings) >= MOST_TEXTS:
            ended = [text for text in siblings if text in self._ended]
            if not ended:
                return False
            self._remove(ended[-1], sibling.group)
        return over <= 0

    def _remove(self, text: SiblingText, group: str) -> None:
        """Called under the lock."""
        self._ended.pop(text, None)
        self._show(group, tuple(other for other in self.texts(group) if other is not text))

    def _show(self, group: str, texts: tuple[SiblingText, ...]) -> None:
        """Called under the lock."""
        if texts:
            self._texts[group] = texts
        else:
            self._texts.pop(group, None)
        self._changed()
