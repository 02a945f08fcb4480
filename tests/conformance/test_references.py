"""References that requests bring along change no output, whatever they say, and help none but their own request: every method's real worker
over a small model of its surroundings (`workbench`)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from sglang.srt.managers.schedule_batch import Req

from sglang_patches.ledger.reference import SEPARATOR
from sglang_patches.ledger.requests import REFERENCE_TOKENS, USAGE
from tests.conformance.drafts import LYING, start_liar
from tests.conformance.test_in_process import LONG, REJECT, SAMPLED, VOCABULARY, _prompts, p_value_of
from tests.conformance.workbench import Counting, Markov, Workbench, output_of, plain_answer, request

LAGS = pytest.mark.parametrize("lags", [True, False], ids=["overlap", "synchronous"])
LATE = pytest.mark.parametrize("late", [False, True], ids=["cpu", "accelerator"])


@pytest.fixture
def workbench(method, spelling_model, draft) -> Workbench:
    return Workbench(method, spelling_model, *([start_liar] if draft == LYING else []))


@pytest.fixture(scope="session")
def model() -> Markov:
    return Markov(VOCABULARY, seed=3)


def expecting(tokens: Sequence[int], **wishes) -> dict:
    """The `custom_params` of a request, as `entry/references.py` leaves them."""
    return {"custom_params": {"specstore": wishes, REFERENCE_TOKENS: list(tokens)}}


def edited(answer: Sequence[int]) -> list[int]:
    """With a token in another's place, one left out and some put in."""
    other = 2 + (answer[10] - 1) % (VOCABULARY - 2)
    return [*answer[:10], other, *answer[11:25], *answer[26:40], *range(2, 9), *answer[40:]]


def references(prompt: Sequence[int], answer: Sequence[int]) -> dict[str, list[int]]:
    draw = random.Random(0)
    return {
        "right": list(answer),
        "edited": edited(answer),
        "another": draw.choices(range(2, VOCABULARY), k=200),
        "empty": [],
        "one token": [answer[0]] * 500,
        "the prompt": list(prompt) * 3,
        "backwards": list(answer[::-1]),
        "in pieces": [token for piece in answer for token in (piece, SEPARATOR)],
        "beyond the vocabulary": [VOCABULARY, *answer, 1 << 30],
    }


def told(req: Req) -> dict:
    """What its answer says of its steps."""
    return getattr(req, USAGE).summary(len(output_of(req)))


@LAGS
@LATE
def test_greedy_output_is_plain_decodings_whatever_the_reference(workbench, model, draft, lags, late):
    prompt = _prompts(1)[0]
    plain = plain_answer(model, prompt, **LONG)
    kinds = references(prompt, plain)
    with workbench.scheduler(model, lags=lags, late=late, size=len(kinds)) as scheduler:
        asked = {
            kind: request(prompt, VOCABULARY, **LONG, **expecting(tokens)) for kind, tokens in kinds.items()
        }
        answers = scheduler.answers(list(asked.values()))
    assert answers == [plain] * len(kinds)
    accepted = {kind: told(req).get("prediction", {}).get("accepted") for kind, req in asked.items()}
    assert accepted["empty"] is None and accepted["one token"] <= 10
    # All but the first token, and the target's own at the end of each step.
    assert accepted["right"] >= len(plain) - 1 - told(asked["right"])["steps"]
    # A liar's nodes have the rows of a reference until what they are worth is learned.
    assert accepted["edited"] > len(plain) / 2 or draft == LYING


@LAGS
def test_sampled_output_has_plain_decodings_distribution(workbench, model, lags):
    (prompt,) = _prompts(1, 40)
    reference = expecting(plain_answer(model, prompt, ignore_eos=True))
    assert p_value_of(workbench, model, "temperature 1", lags, **reference) > REJECT


@LAGS
def test_requests_with_seeds_get_plain_decodings_tokens(workbench, model, lags, murmur_hash):
    prompts = _prompts(4)
    wanted = [SAMPLED["temperature 1"] | {"sampling_seed": seed, "ignore_eos": True} for seed in range(4)]
    expected = [plain_answer(model, p, **kind) for p, kind in zip(prompts, wanted, strict=True)]
    with workbench.scheduler(model, lags=lags, seeded=True) as scheduler:
        asked = [
            request(prompt, VOCABULARY, **kind, **expecting(edited(answer)))
            for prompt, kind, answer in zip(prompts, wanted, expected, strict=True)
        ]
        assert scheduler.answers(asked) == expected
    assert all(told(req)["prediction"]["accepted"] for req in asked)


@LAGS
@LATE
def test_a_retracted_request_follows_its_reference_again(workbench, model, lags, late):
    """Half of them lose what they have said."""
    prompts, draw = _prompts(6), random.Random(3)
    plain = [plain_answer(model, prompt, **LONG) for prompt in prompts]
    asked = [
        request(prompt, VOCABULARY, **LONG, **expecting(edited(answer)))
        for prompt, answer in zip(prompts, plain, strict=True)
    ]
    for req in asked[::2]:
        req.input_embeds = []
    left = [req for req in asked for _ in range(3)]
    with workbench.scheduler(model, lags=lags, late=late) as scheduler:

        def retract() -> None:
            there = [req for req in left if req in scheduler.running]
            if there and draw.random() < 0.5:
                req = draw.choice(there)
                left.remove(req)
                scheduler.retract(scheduler.running.index(req))

        assert scheduler.answers(asked, retract) == plain
    assert len(left) < 6, "few were retracted: this shows little"
    assert all(told(req)["prediction"]["accepted"] > 20 for req in asked)


@LAGS
def test_a_reference_drafts_for_its_own_request_alone(method, workbench, lags, datastore):
    """The target counts upwards: what comes is known to who has read it, and to nobody else. One request runs beside the other, two come
    after it, one of them as the next of its conversation, and another tenant's."""
    start = 100 + 200 * lags
    text, said = list(range(start + 1, start + 61)), 10
    counting, prompt = Counting(512), [start - 1, start]
    tenant, other = f"{method.name}, mine", f"{method.name}, other"  # the datastore is that of all methods
    own = {"max_new_tokens": said} | expecting(text, conversation="c", tenant=tenant)
    others = [{"conversation": "c", "tenant": tenant}, {"tenant": tenant}, {"tenant": other}]

    def asking(wishes: dict) -> Req:
        return request(prompt, 512, max_new_tokens=60, custom_params={"specstore": wishes})

    place = {"endpoint": datastore.endpoint, "tenant": f"{method.name}-reference"}
    with workbench.scheduler(counting, lags=lags, request_tenant="custom_params", **place) as scheduler:
        mine, beside = request(prompt, 512, **own), asking({"tenant": tenant, "publish": False})
        assert scheduler.answers([mine, beside]) == [text[:said], text]
        after = [asking(wishes | {"publish": False}) for wishes in others]
        assert [scheduler.answers([req]) for req in after] == [[text]] * len(after)
    assert told(mine)["prediction"]["accepted"] >= said - 1 - told(mine)["steps"]
    assert told(mine)["steps"] <= 4, "the reference drafted nothing: this shows nothing"
    for req in (beside, *after):
        stored = sum(count for name, count in told(req)["accepted"].items() if name != "draft_model")
        # What it has said, and what was verified with its last token and after it.
        assert "prediction" not in told(req) and stored <= said + 2 * 8
