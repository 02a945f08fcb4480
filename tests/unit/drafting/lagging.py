"""Requests decoded as on an accelerator with overlap scheduling: results lag a step behind, and a courier may bring them ahead."""

import random

import msgspec

from sglang_patches.drafting.seams import NO_PATIENCE
from sglang_patches.drafting.speculation import Speculation
from sglang_patches.exchange.messages import GREEDY
from sglang_patches.ledger.requests import Step
from tests.support.agreeing_model import VOCABULARY, target
from tests.unit.drafting.texts import make_book, make_req

NODES = 7


class Lagging:
    """tell: what a courier does with (flight, each request's tokens). between: is called between any two things that the worker
    does. chances: of what may happen to a request after a step."""

    def __init__(self, side, tell, requests=3, seed=0, between=lambda: None, chances=()):
        self.side, self.tell, self.between = side, tell, between
        self.draw, self.chances = random.Random(seed), dict(chances)
        self.book = make_book()
        self.speculation = Speculation(side, NODES, self._sampling)
        self.reqs = [None] * requests
        self.texts = [[]] * requests  # all tokens that the target has emitted
        self.pending = [[]] * requests  # of them those that the request does not have yet
        self.away = [0] * requests  # steps
        self.steps = self.emitted = 0
        for row in range(requests):
            self._begin(row)

    def _sampling(self, state):
        return msgspec.structs.replace(GREEDY, ends=state.ends)

    def _begin(self, row):
        """A prompt is prefilled. The name may be an earlier request's."""
        prompt = [self.draw.randrange(VOCABULARY) for _ in range(self.draw.randint(2, 5))]
        ends = [self.draw.randrange(VOCABULARY)] if self._happens("ends") else None
        self.reqs[row] = make_req(f"r{row}", prompt, stop_token_ids=ends)
        self.speculation.open(self.book.open([self.reqs[row]]))
        self._prefilled(row, prompt, target(prompt))

    def _prefilled(self, row, text, token):
        self.texts[row], self.pending[row] = [*text, token], [token]

    def run(self, steps):
        """Tokens a step and request."""
        self.steps = self.emitted = 0
        for _ in range(steps):
            self.step()
        return self.emitted / self.steps

    def step(self):
        rows = [row for row, away in enumerate(self.away) if not away] or [0]
        reqs = [self.reqs[row] for row in rows]
        lengths = [len(self.texts[row]) for row in rows]
        self.between()
        states, taken_back = self.book.read(Step(reqs, lengths, [self.pending[row] for row in rows]))
        self.between()
        self.speculation.taken_back(taken_back)
        outcomes = self.book.settle(states)
        if outcomes:
            self.speculation.heard(outcomes)
        self.between()
        trees = self.speculation.look_up(states, [NODES] * len(rows), lambda batch, misses: NO_PATIENCE)
        self.between()
        self.check(rows, states)
        for state, tree in zip(states, trees, strict=True):
            tree.check_integrity(nodes=NODES)
            state.tree = tree
        self.speculation.verification_launched(states)
        emitted = [self._verified(self.texts[row], tree) for row, tree in zip(rows, trees, strict=True)]
        self.tell(self.speculation.launched(states), emitted)
        self.between()
        self.steps += len(rows)
        self.emitted += sum(map(len, emitted))
        self._process(rows, emitted)
        self.between()
        for row in rows:
            self._meddle(row)
            self.between()
        self.away = [max(0, away - 1) for away in self.away]

    def check(self, rows, states):
        """The worker's trie and the draft side stand where the text ends."""
        for row, state in zip(rows, states, strict=True):
            if state.session in self.speculation._cache:
                assert self.speculation._cache.trie(state.session).length == len(self.texts[row])

    @staticmethod
    def _verified(text, tree):
        emitted, parent = [], -1
        while True:
            emitted.append(target(text + emitted))
            rows = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
            parent = next((at for at, row in enumerate(rows) if row == (parent, emitted[-1])), None)
            if parent is None:
                return emitted

    def _process(self, rows, emitted):
        """The scheduler processes the results of the step before; a request that has ended then ran once too often."""
        for row, tokens in zip(rows, emitted, strict=True):
            req, before = self.reqs[row], self.pending[row]
            ends = set(req.sampling_params.stop_token_ids or ())
            req.output_ids.extend(before)
            self.texts[row], self.pending[row] = self.texts[row] + tokens, tokens
            over = [at for at, token in enumerate(before) if token in ends]
            if over:
                self._end(row, len(req.output_ids) - len(before) + over[0] + 1)
            elif self._happens("finish"):
                self._end(row, len(req.output_ids))

    def _end(self, row, length):
        self.reqs[row].finished_len = length
        self.speculation.close([self.book.close(self.reqs[row].rid)])
        self.between()
        self._begin(row)

    def _happens(self, what):
        return self.draw.random() < self.chances.get(what, 0.0)

    def _meddle(self, row):
        if self._happens("kill"):
            self.side.forget()
        if self._happens("away"):
            self.away[row] = 2
        if self._happens("retract"):
            self._retract(row)

    def _retract(self, row):
        """Its last step is dropped, or comes in just before. What is drawn again may be another token, and is prefilled."""
        text, pending = self.texts[row], self.pending[row]
        ends = set(self.reqs[row].sampling_params.stop_token_ids or ())
        if ends.intersection(pending):
            return  # it ends
        kind = self.draw.choice(("kept", "same", "other", "nothing"))
        if kind == "kept":
            self.reqs[row].output_ids.extend(pending)
        else:
            text = text[: len(text) - len(pending)]
        self.away[row] = self.draw.randint(0, 2)
        if kind == "nothing":
            self.texts[row], self.pending[row] = text, []
        else:
            self._prefilled(row, text, (target(text) + (kind == "other")) % VOCABULARY)
