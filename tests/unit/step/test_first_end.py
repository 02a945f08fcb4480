"""Accepted runs end a request where plain decoding ends it, through SGLang's own functions, hooked."""

from array import array
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req  # noqa: E402
from sglang.srt.managers.scheduler_components.batch_result_processor import (  # noqa: E402
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.utils import GenerationBatchResult  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402

from sglang_patches.step.ends import register_ends, tokens_through_end  # noqa: E402

PIECES = ("a", "b", "ab", "", "ba", "\n", "b.", "aa")  # a token's text; special tokens have none
EOS, VOCABULARY = 3, len(PIECES)
TOKENIZER = SimpleNamespace(
    eos_token_id=EOS,
    additional_stop_token_ids=None,
    decode=lambda tokens, **_: "".join(PIECES[token] for token in tokens),
    encode=lambda text, **_: list(text),
)
TOKENS = st.integers(0, VOCABULARY - 1)
CONDITIONS = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(1, 24),
        "stop": st.lists(st.text("ab.\n", min_size=1, max_size=4), max_size=3),
        "stop_regex": st.lists(st.sampled_from(["a+b", "b{2}", "^ab", "a$", r"b\."]), max_size=2),
        "stop_token_ids": st.lists(TOKENS, max_size=2),
        "ignore_eos": st.booleans(),
    }
)


@pytest.fixture(scope="module", autouse=True)
def hooked():
    register_ends()


def request(conditions: dict) -> Req:
    params = SamplingParams(**conditions)
    params.normalize(TOKENIZER)
    req = Req("r", "", array("q", [0]), params, eos_token_ids={EOS}, vocab_size=VOCABULARY)
    req.tokenizer = TOKENIZER
    return req


class Processor(SimpleNamespace):
    """What takes a step's runs from SGLang's scheduler, with grammars as SGLang has them."""

    def advance_grammar_fsm(self, result, batch):
        SchedulerBatchResultProcessor.advance_grammar_fsm(self, result, batch)

    _accept_grammar_tokens = SchedulerBatchResultProcessor._accept_grammar_tokens


def take(reqs: list[Req], runs: list[list[int]], early: bool = False) -> list[int]:
    """A decode step that accepts these runs, as SGLang's scheduler takes it. Returns how many drafts SGLang counts as accepted.

    early: whether the next step has asked for the grammars' states before.
    """
    width = max(map(len, runs))
    result = GenerationBatchResult(
        next_token_ids=torch.tensor([token for run in runs for token in (*run, *[0] * (width - len(run)))]),
        accept_lens=torch.tensor([len(run) for run in runs], dtype=torch.int32),
        speculative_num_draft_tokens=width,
    )
    told = result.accept_lens
    processor = Processor(
        metrics_reporter=SimpleNamespace(snapshot_spec_decode_metrics=lambda *_: None),
        model_worker=SimpleNamespace(on_verify_complete_cpu=lambda *_, **__: None),
    )
    constrained = any(req.grammar is not None for req in reqs)
    batch = SimpleNamespace(
        reqs=reqs, has_grammar=constrained, forward_mode=ForwardMode.DECODE, is_prefill_only=False
    )
    if early:
        processor.advance_grammar_fsm(result, batch)
    emitted = SchedulerBatchResultProcessor._resolve_spec_v2_tokens(processor, result, batch)
    for req, tokens in zip(reqs, emitted, strict=True):
        if not req.finished():
            req.output_ids.extend(tokens)
            req.update_finish_state(len(tokens))
    assert told.tolist() == [len(run) for run in runs], "the next step's draft input has this tensor"
    return result.num_correct_drafts_per_req_cpu


def answer(req: Req, tokens: list[int], lengths: list[int]) -> dict:
    """What the request answers if its tokens come in runs of these lengths, the last one again and again."""
    lengths, drafts = list(lengths), 0
    while tokens and not req.finished():
        length = lengths.pop(0) if len(lengths) > 1 else lengths[0]
        drafts += sum(take([req], [tokens[:length]]))
        tokens = tokens[length:]
    return {
        "output": list(req.output_ids),
        "through stop": list(req.output_ids_through_stop),
        "reason": req.finished_reason and req.finished_reason.to_json(),
        "completion": req.spec_verify_ct + drafts,
        "cached": req.kv.kv_committed_len,
    }


@given(
    CONDITIONS, st.lists(TOKENS, min_size=1, max_size=32), st.lists(st.integers(1, 9), min_size=1, max_size=8)
)
def test_any_conditions_and_any_runs_give_plain_decodings_answer(conditions, tokens, lengths):
    assert answer(request(conditions), tokens, lengths) == answer(request(conditions), tokens, [1])


@given(st.lists(st.tuples(CONDITIONS, st.lists(TOKENS, min_size=1, max_size=9)), min_size=1, max_size=4))
def test_each_request_of_a_batch_ends_at_its_own_first_end(rows):
    reqs = [request(conditions) for conditions, _ in rows]
    take(reqs, [run for _, run in rows])
    alone = [answer(request(conditions), run, [1])["output"] for conditions, run in rows]
    assert [list(req.output_ids) for req in reqs] == alone


@pytest.mark.parametrize(
    ("conditions", "run", "through"),
    [
        ({"stop": ["aa"]}, [0, EOS, 7, 1], 2),  # EOS before a stop string
        ({"stop": ["aa", "b."], "ignore_eos": True}, [1, 6, 0, 7], 2),  # the later string is listed first
        ({"stop": ["aa"], "stop_token_ids": [1]}, [0, 1, 7], 2),  # a stop token before a stop string
        ({"stop": ["aa"], "max_new_tokens": 2}, [0, 1, 7], 2),  # the cap before a stop string
        ({"stop_regex": ["a+b"], "stop": ["."]}, [2, 6], 1),
        ({}, [0, VOCABULARY, 1], 2),  # what a NaN gives
    ],
)
def test_the_first_of_two_ends_in_a_run(conditions, run, through):
    req = request({"max_new_tokens": 9} | conditions)
    assert take([req], [run]) == [through - 1]
    assert req.finished() and len(req.output_ids) == through == len(req.output_ids_through_stop)
    assert req.kv.kv_committed_len == through


def test_an_abort_ends_a_request_within_its_run():
    req = request({"max_new_tokens": 9})
    req.to_finish = FINISH_ABORT("gone")
    take([req], [[0, 1, 2]])
    assert req.finished() and list(req.output_ids) == [0] and req.to_finish is None


class Count:
    """A grammar of so many tokens, none of which is refused."""

    def __init__(self, tokens: int) -> None:
        self._left = tokens

    def accept_token(self, token: int) -> None:
        self._left -= 1

    def is_terminated(self) -> bool:
        return self._left == 0


@pytest.mark.parametrize("early", [False, True], ids=["as its result is taken", "before"])
@pytest.mark.parametrize(
    ("conditions", "tokens", "through"), [({}, 2, 2), ({"stop": ["a"]}, 2, 1), ({"stop": ["aa"]}, 3, 3)]
)
def test_a_run_is_cut_where_its_grammar_ends(conditions, tokens, through, early):
    """The request ignores the end token, so that nothing but the grammar ends it there."""
    constrained, free = request({"ignore_eos": True} | conditions), request({"ignore_eos": True})
    constrained.grammar = Count(tokens)
    assert take([free, constrained], [[1, 1, 1], [0, EOS, 1, 7]], early) == [2, through - 1]
    assert len(constrained.output_ids) == through == constrained.kv.kv_committed_len
    assert constrained.finished() and not free.finished()


def test_a_run_that_its_grammar_refuses_has_no_accepted_draft():
    def refuse(token: int) -> None:
        raise ValueError("not in the grammar")

    req = request({})
    req.grammar = SimpleNamespace(accept_token=refuse, is_terminated=lambda: False)
    assert take([req], [[0, 1, 2]]) == [0]
    assert req.finished() and not req.output_ids


def test_what_a_grammar_says_is_asked_of_whole_runs_alone():
    """SGLang cuts a run at its grammar's end itself, and a grammar that has ended would end the first token's request."""
    req = request({"max_new_tokens": 9})
    req.grammar = SimpleNamespace(is_terminated=lambda: True)
    assert tokens_through_end(req, [0, 1, 2]) == 3
    assert req.grammar is not None and not req.output_ids and not req.finished()


def test_a_prompt_that_is_read_alone_advances_no_grammar():
    """SGLang gives such a batch a token in place of each that it does not draw."""
    taken = []
    req = SimpleNamespace(
        grammar=SimpleNamespace(accept_token=taken.append),
        is_retracted=False,
        inflight_middle_chunks=0,
        finished=lambda: False,
    )
    result = GenerationBatchResult(next_token_ids=torch.tensor([0]))
    batch = SimpleNamespace(
        reqs=[req], has_grammar=True, forward_mode=ForwardMode.EXTEND, is_prefill_only=True
    )
    Processor().advance_grammar_fsm(result, batch)
    assert taken == [] and result.grammar_advanced


def test_where_a_grammar_allows_no_token_one_is_drawn_all_the_same():
    info = SimpleNamespace(
        grammar_mask=SimpleNamespace(apply=lambda logits: logits[1].fill_(float("-inf"))),
        _apply_pre_grammar_logits_transforms=lambda logits: None,
        _apply_post_grammar_logits_transforms=lambda logits: None,
    )
    logits = torch.tensor([[1.0, float("-inf")], [3.0, 4.0]])
    SamplingBatchInfo.apply_logits_bias(info, logits)
    assert logits.tolist() == [[1.0, float("-inf")], [0.0, 0.0]]
    torch.multinomial(logits.softmax(-1), 1)
