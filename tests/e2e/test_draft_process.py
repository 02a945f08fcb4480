"""The draft process alone, with a real model in SGLang's runner: whatever the target does, what is drafted is the model's own choice."""

import random
import time
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sglang_patches.draft_process.settings import DraftSettings
from sglang_patches.drafting.cache import SpeculationCache
from sglang_patches.drafting.channel import RESTARTS
from sglang_patches.exchange.messages import Closed, Committed, Growth, Lost, Opened, Verifying
from sglang_patches.step.assembly import start_draft_process
from tests.support.tiny_drafts import write_stranger
from tests.support.tiny_model import SPELLING_VOCABULARY, texts_of, write_spelling_model
from tests.unit.plugin.resolution import write_model

LOOKAHEAD = 4
TOKENS = 700  # holds some of the sessions, not all
SECONDS = 60  # of patience with a busy machine


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_spelling_model(tmp_path_factory.mktemp("model"))


def settings(model, tokenizer, vocabulary, **further):
    return DraftSettings(
        method="SAGUARO",
        arguments={"model_path": str(model), "dtype": "float32"} | further,
        quantization="",
        tokenizer=str(tokenizer),
        tokenizer_revision="",
        device="cpu",
        tokens=TOKENS,
        sessions=8,
        rows=16,
        lookahead=LOOKAHEAD,
        namespace="model",
        fingerprint="",
        context_length=1024,
        vocabulary=vocabulary,
        serial=False,
        cores="",
    )


@pytest.fixture(scope="module")
def vocabulary(model):
    return AutoConfig.from_pretrained(model).vocab_size


@pytest.fixture(scope="module")
def channel(model, vocabulary):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        patch.setenv("SGLANG_USE_CUDA_IPC_TRANSPORT", "1")  # as SGLang leaves it in a server on a GPU
        channel = start_draft_process(settings(model, model, vocabulary))
        yield channel
        channel.close()


@pytest.fixture(scope="module")
def choices(model):
    return choices_of(model)


def choices_of(model, vocabulary=None):
    """The model's likeliest continuation of a text. vocabulary: of which tokens, all if not given."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    left_out = list(range(vocabulary, reference.config.vocab_size)) if vocabulary else None

    def continuation(text, count):
        with torch.no_grad():
            out = reference.generate(
                torch.tensor([text]),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                eos_token_id=None,
                suppress_tokens=left_out,
            )
        return out[0, len(text) :].tolist()

    return continuation


class Session:
    """The worker's side of one: its text, and what the draft process has sent."""

    cache = SpeculationCache()  # of all: growth of any of them may come

    def __init__(self, name, channel, text):
        self.name, self.channel, self.text = name, channel, list(text)
        self.open()

    def open(self):
        trie = self.cache.open(self.name, len(self.text))
        self.channel.post([Opened(self.name, np.array(self.text, np.int32), trie.epoch)])

    def wait_for(self, chain):
        """Until the chain is drafted."""
        limit = time.monotonic() + SECONDS
        while len(nodes := self.cache.trie(self.name).follow(chain)) < len(chain):
            assert time.monotonic() < limit, (
                f"{self.name}: {chain} is not drafted, only {len(nodes)} tokens of it"
            )
            self.take(0.1)
        return nodes

    def take(self, seconds):
        for answer in self.channel.collect(seconds):
            assert isinstance(answer, Growth), answer
            assert self.cache.grow(answer)

    def is_lost(self):
        """Waits until the draft process says so."""
        limit = time.monotonic() + SECONDS
        while time.monotonic() < limit:
            answers = self.channel.collect(0.1)
            if any(isinstance(answer, Lost) and answer.session == self.name for answer in answers):
                return True
        return False

    def verify(self, chain, nodes):
        trie = self.cache.trie(self.name)
        parents = np.array([trie.root, *nodes[:-1]], np.int64)
        self.channel.post(
            [Verifying(self.name, trie.epoch, np.array(nodes), parents, np.array(chain, np.int32))]
        )

    def commit(self, tokens):
        """Whether they were foreseen."""
        tokens = np.array(tokens, np.int32)
        foreseen = self.cache.advance(self.name, len(self.text), tokens)
        epoch = self.cache.trie(self.name).epoch
        self.channel.post([Committed(self.name, len(self.text), tokens, epoch)])
        self.text += tokens.tolist()
        return foreseen

    def close(self):
        """Idempotent."""
        self.cache.close(self.name)
        self.channel.post([Closed(self.name)])


@pytest.fixture
def begin(channel):
    """Begins a session. A test that fails leaves none behind: it would keep the KV slots that others need."""
    with ExitStack() as stack:

        def begin(name, text):
            session = Session(name, channel, text)
            stack.callback(session.close)
            return session

        yield begin


def test_drafts_are_the_models_choices_after_every_outcome(model, begin, choices):
    """Kept slots, taken slots, slots given back: a fault in one of them changes what the model goes on with."""
    draw = random.Random(0)
    session, foreseen = begin("s", texts_of(model, 1, 300)[0]), []
    for _ in range(25):
        chain = choices(session.text, LOOKAHEAD)
        session.verify(chain, session.wait_for(chain))
        accepted = chain[: draw.randint(0, LOOKAHEAD)]
        all_right = len(accepted) == LOOKAHEAD and draw.random() < 0.7
        refused = chain[len(accepted) :][:1]  # no target has this as its own token: it would have accepted it
        others = [token for token in range(4, 40) if token not in refused]
        end = choices(session.text + accepted, 1)[0] if all_right else draw.choice(others)
        if draw.choice([False, True]) and all_right:  # the outcome comes after the guesses, or before
            session.wait_for([*accepted, end])
        session.take(0.0)
        foreseen.append(session.commit([*accepted, end]))
    assert True in foreseen and False in foreseen


def test_sessions_take_the_place_of_those_that_ended(model, begin, choices):
    for turn in range(2):
        for name, text in enumerate(texts_of(model, 4, 250)):
            session = begin(f"{turn}-{name}", text)
            session.wait_for(choices(text, LOOKAHEAD))
            session.close()


def test_sessions_take_the_place_of_idle_ones_and_these_come_back(model, channel, begin, choices):
    sessions = [begin(f"idle-{at}", text) for at, text in enumerate(texts_of(model, 3, 300)[:3])]
    for session in sessions[:2]:
        session.wait_for(choices(session.text, LOOKAHEAD))
    for session in sessions[:2]:  # two steps without a draft: as under load
        for _ in range(2):
            session.commit(choices(session.text, 1))
    sessions[2].wait_for(choices(sessions[2].text, LOOKAHEAD))
    for session in sessions[1:]:
        session.close()
    trie = sessions[0].cache.trie("idle-0")
    none = np.empty(0, np.int64)
    channel.post([Verifying("idle-0", trie.epoch, none, none, np.empty(0, np.int32))])
    end = choices(sessions[0].text, 1)
    sessions[0].commit(end)
    sessions[0].wait_for(choices(sessions[0].text, LOOKAHEAD))


@contextmanager
def drafting_for(target, draft):
    """A draft process whose model is `draft`; it must not be started again."""
    before = RESTARTS._value.get()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        channel = start_draft_process(settings(draft, target, SPELLING_VOCABULARY))
    try:
        yield channel
        assert channel._outbox is not None and RESTARTS._value.get() == before
    finally:
        channel.close()


def test_a_model_with_fewer_tokens_and_a_shorter_context_drafts_for_what_it_can_take(model, tmp_path):
    """As Qwen2.5's sizes differ."""
    fewer, shorter = SPELLING_VOCABULARY - 6, 400
    draft = write_spelling_model(tmp_path, vocabulary=fewer, context=shorter)
    short, long = texts_of(draft, 1, 40)[0], texts_of(draft, 2, 390)[1]
    with drafting_for(model, draft) as channel:
        strange = Session("strange", channel, [*short, fewer, *short])
        fine, too_long = Session("fine", channel, short), Session("long", channel, long)
        chain = choices_of(draft)(short, LOOKAHEAD)
        nodes = fine.wait_for(chain)
        fine.verify(chain, nodes)
        others = [token for token in range(4, 30) if token != chain[0]]
        fine.commit(others[:1])
        fine.wait_for(choices_of(draft)(fine.text, LOOKAHEAD))
        for session in (strange, too_long):
            assert not len(session.cache.trie(session.name))
        fine.commit([SPELLING_VOCABULARY - 1])
        assert fine.is_lost()
        fine.open()
        after = Session("after", channel, short[:20])
        after.wait_for(choices_of(draft)(short[:20], LOOKAHEAD))
        assert not len(fine.cache.trie("fine"))
        for session in (strange, too_long, fine, after):
            session.close()


def test_a_model_with_more_tokens_drafts_the_target_s(model, tmp_path):
    draft = write_spelling_model(tmp_path, vocabulary=SPELLING_VOCABULARY + 200)
    text = [token % SPELLING_VOCABULARY for token in texts_of(draft, 1, 40)[0]]
    with drafting_for(model, draft) as channel:
        session = Session("s", channel, text)
        session.wait_for(choices_of(draft, SPELLING_VOCABULARY)(text, LOOKAHEAD))
        session.close()


def test_a_model_of_other_tokens_is_refused(model, vocabulary, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    stranger = write_stranger(tmp_path)
    with pytest.raises(RuntimeError, match="its tokenizer is not the target's"):
        start_draft_process(settings(stranger, model, vocabulary))


def test_a_model_with_another_kind_of_cache_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    path = write_model(tmp_path, "MLA")
    with pytest.raises(RuntimeError, match="a draft model with multi-head latent attention is not supported"):
        start_draft_process(settings(path, "", 1000))
