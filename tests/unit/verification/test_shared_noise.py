"""The noise that target and draft share: its bits, the draws' distribution, and how often two sides draw the same."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, contingency

from sglang_patches.verification import shared_noise
from sglang_patches.verification.filters import keep_filtered
from sglang_patches.verification.shared_noise import (
    NO_NOISE,
    best,
    draw,
    exponentials,
    filtered_probabilities,
    random_bits,
    row_keys,
)

REJECT = 1e-4  # seeds are fixed, so a run that passes always passes
LARGEST = 2**63 - 1


def reference_bits(seed, position, token):
    """In Python's integers."""

    def finalize(h):
        h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
        h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
        return h ^ h >> 16

    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    key = z ^ z >> 31
    return finalize(finalize(token ^ key % 2**32) ^ key >> 32)


def random_rows(rows, vocab, scale=3.0, seed=0):
    """Probabilities, seeds and positions."""
    source = torch.Generator().manual_seed(seed)
    probabilities = torch.softmax(scale * torch.randn(rows, vocab, generator=source), dim=-1)
    seeds = torch.randint(0, LARGEST, (rows,), generator=source)
    return probabilities, seeds, torch.randint(0, 10_000, (rows,), generator=source)


# The hash


def test_the_hash_is_the_published_ones():
    keys = row_keys(torch.full((5,), 1234567), torch.arange(5)).numpy().view(np.uint64)
    assert keys.tolist() == [  # SplitMix64's first outputs for this seed, as its authors' code has them
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert shared_noise._finalize(torch.tensor([0, 1])).tolist() == [0, 0x514E28B7]  # MurmurHash3's


@pytest.mark.parametrize("seed", [0, 1, 42, 2**32, LARGEST])
@pytest.mark.parametrize("position", [0, 1, 2**31, 10**9])
def test_torch_numba_and_python_have_the_same_bits(seed, position):
    tokens = 300
    bits = random_bits(torch.tensor([seed]), torch.tensor([position]), tokens)[0].tolist()
    key = int(row_keys(torch.tensor([seed]), torch.tensor([position]))[0]) % 2**64
    low, high = np.uint32(key % 2**32), np.uint32(key >> 32)
    assert bits == [shared_noise._bits(low, high, token) for token in range(tokens)]
    assert bits == [reference_bits(seed, position, token) for token in range(tokens)]


def test_torch_and_numba_draw_the_same():
    rows = random_rows(40, 49_152)
    scores = shared_noise._scores(*rows)
    assert torch.equal(draw(*rows), scores.argmax(dim=-1))
    tokens, found = best(*rows, 6)
    assert torch.equal(tokens, scores.topk(6).indices)
    assert torch.equal(found, rows[0].gather(1, tokens))
    assert not torch.equal(tokens, rows[0].topk(6).indices)


# The draw


@pytest.mark.parametrize("over", ["seeds", "positions", "tokens"])
def test_noise_is_uniform(over):
    count = 1 << 16
    one, many = torch.zeros(1, dtype=torch.int64), torch.arange(count)
    bits = {
        "seeds": lambda: random_bits(many, one.expand(count), 1),
        "positions": lambda: random_bits(one.expand(count), many, 1),
        "tokens": lambda: random_bits(one, one, count),
    }[over]().flatten()
    for shift in (0, 8, 16, 24):
        assert chisquare(torch.bincount(bits >> shift & 0xFF, minlength=256)).pvalue > REJECT
    variates = -torch.log1p(-(bits.double() + 0.5) / 2**32)
    assert variates.mean() == pytest.approx(1, abs=0.02) and variates.var() == pytest.approx(1, abs=0.04)


def test_exponential_variates_are_finite_and_positive():
    found = exponentials(torch.arange(50), torch.arange(50), 50_000)
    assert (found > 0).all() and torch.isfinite(found).all()
    ends = torch.tensor([0.0, 2.0**32 - 1]) * 2.0**-32 + 2.0**-33
    ends = -torch.log1p(-ends.clamp(max=shared_noise._BELOW_ONE))
    assert ends.tolist() == pytest.approx([2.0**-33, 24 * np.log(2)], rel=1e-6)
    assert (exponentials(torch.tensor([NO_NOISE]), torch.tensor([3]), 10) == 1).all()


DISTRIBUTION = torch.tensor([0.35, 0.0, 0.25, 0.2, 0.1, 0.06, 0.04])


def drawn(seeds, positions, weights=1.0):
    return draw((DISTRIBUTION * weights).expand(len(seeds), -1), seeds, positions)


def fits(tokens):
    counts = torch.bincount(tokens, minlength=len(DISTRIBUTION)).numpy()
    possible = DISTRIBUTION.numpy() > 0
    if counts[~possible].any():
        return 0.0
    expected = DISTRIBUTION.numpy()[possible].astype(np.float64)
    return chisquare(counts[possible], expected / expected.sum() * len(tokens)).pvalue


def independent(left, right):
    """p-value of a chi-square test of two columns of tokens."""
    return contingency.chi2_contingency(contingency.crosstab(left.numpy(), right.numpy()).count).pvalue


def test_draws_have_the_distribution_and_are_independent():
    count, source = 40_000, np.random.default_rng(0)
    numbers, one = torch.arange(count), torch.full((count,), 9)
    apart = torch.from_numpy(source.integers(0, LARGEST, count))
    by_seed, by_position, neighbours = drawn(apart, one), drawn(one, numbers), drawn(numbers, one)
    for tokens in (by_seed, by_position, neighbours):
        assert fits(tokens) > REJECT
    for left, right in (
        (by_seed, drawn(apart, one + 1)),  # two positions of a request
        (by_position[:-1], by_position[1:]),
        (neighbours[:-1], neighbours[1:]),
        (by_position, drawn(one + 1, numbers)),  # two requests
    ):
        assert independent(left, right) > REJECT


def test_the_tests_of_draws_notice_faults():
    numbers, one = torch.arange(40_000), torch.full((40_000,), 9)
    biased = torch.ones(len(DISTRIBUTION))
    biased[0] = 1.1
    assert fits(drawn(one, numbers, biased)) < 1e-6
    sticky = drawn(one, numbers // 2 * 2)
    assert fits(sticky) < 1e-6 or independent(sticky[:-1], sticky[1:]) < 1e-6


def test_the_draw_is_argmax_of_log_p_and_gumbel_noise():
    probabilities, seeds, positions = random_rows(200, 1000)
    gumbel = -exponentials(seeds, positions, 1000).double().log()
    assert torch.equal(draw(probabilities, seeds, positions), (probabilities.log() + gumbel).argmax(dim=-1))


def test_a_draw_depends_on_its_own_row_alone():
    probabilities, seeds, positions = random_rows(70, 500)
    together = draw(probabilities, seeds, positions)
    alone = [
        int(draw(p[None], s[None], i[None])) for p, s, i in zip(probabilities, seeds, positions, strict=True)
    ]
    assert together.tolist() == alone
    shuffled = torch.randperm(70, generator=torch.Generator().manual_seed(0))
    again = shared_noise._scores(probabilities[shuffled], seeds[shuffled], positions[shuffled]).argmax(dim=-1)
    assert torch.equal(again, together[shuffled])


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_rows_without_noise_are_ordered_by_probability(monkeypatch, on_host):
    if not on_host:

        def on_device(probabilities, seeds, positions, count):
            tokens = shared_noise._scores(probabilities, seeds, positions).topk(count, dim=-1).indices
            return tokens, probabilities.gather(1, tokens)

        monkeypatch.setattr(shared_noise, "_best_on_host", on_device)
    probabilities, seeds, positions = random_rows(30, 700)
    seeds[::2] = NO_NOISE
    tokens, found = best(probabilities, seeds, positions, 5)
    assert torch.equal(tokens[::2], probabilities[::2].topk(5).indices)
    assert not torch.equal(tokens[1::2], probabilities[1::2].topk(5).indices)
    assert torch.equal(draw(probabilities, seeds, positions), tokens[:, 0])
    assert torch.equal(found, probabilities.gather(1, tokens))


def test_behind_the_last_possible_token_the_probability_is_zero():
    probabilities = torch.zeros(2, 600)
    probabilities[:, [3, 500]] = torch.tensor([0.9, 0.1])
    tokens, found = best(probabilities, torch.tensor([NO_NOISE, 5]), torch.tensor([0, 0]), 4)
    assert tokens[0, :2].tolist() == [3, 500] and sorted(tokens[1, :2].tolist()) == [3, 500]
    assert (found[:, :2] > 0).all() and (found[:, 2:] == 0).all()


def test_filtered_probabilities_are_those_after_temperature():
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(0))
    temperatures, top_ps = torch.linspace(0.3, 2.0, 8), torch.full((8,), 0.8)
    expected = torch.softmax(logits / temperatures[:, None], dim=-1)
    assert torch.equal(filtered_probabilities(logits, temperatures, None, None, None), expected)
    filtered = filtered_probabilities(logits.bfloat16(), temperatures, None, top_ps, None)
    coarse = torch.softmax(logits.bfloat16().float() / temperatures[:, None], dim=-1)
    assert torch.equal(filtered, keep_filtered(coarse, None, top_ps, None))
    assert not torch.equal(filtered, coarse)


# How often two sides draw the same token. Pairs of a target's and a draft's distribution: normal logits, the draft's with an error.


def pairs(scale, error, rows, vocab, seed=0):
    source = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, vocab, generator=source)
    errors = error * torch.randn(rows, vocab, generator=source)
    return torch.softmax(logits, dim=-1), torch.softmax(logits + errors, dim=-1)


def agreement(p, q, seed=0):
    """How often target and draft draw the same token, and how often, where they do not, the target's is among the draft's next
    four."""
    _, seeds, positions = random_rows(len(p), 1, seed=seed)
    target, (guesses, _) = draw(p, seeds, positions), best(q, seeds, positions, 5)
    same = guesses == target[:, None]
    return float(same[:, 0].float().mean()), float(same[~same[:, 0], 1:].any(dim=-1).float().mean())


def test_two_sides_agree_as_often_as_theory_says():
    p, q = pairs(2.0, 1.0, 300, 40)
    # Both draw v where every other token's variate is large enough for both of them.
    ratios = torch.maximum(p[:, None] / p[:, :, None], q[:, None] / q[:, :, None])
    each = (1 / ratios.sum(dim=-1)).sum(dim=-1)
    trials = 200
    found, _ = agreement(p.repeat(trials, 1), q.repeat(trials, 1))
    spread = float((each * (1 - each)).mean() / (trials * len(p))) ** 0.5
    assert found == pytest.approx(float(each.mean()), abs=4 * spread)
    apart = (p - q).abs().sum(dim=-1) / 2
    assert ((each >= (1 - apart) / (1 + apart) - 1e-6) & (each <= 1 - apart + 1e-6)).all()  # Daliri et al.


# entropy, total variation; accepted by rejection sampling, shared noise, a greedy draft, a sampled draft; recovered alone, shared
MEASURED = [
    ((2.46, 0.78), (4.2, 0.29), (0.708, 0.641, 0.184, 0.074), (0.28, 0.88)),
    ((4.37, 0.83), (2.0, 0.24), (0.757, 0.703, 0.452, 0.285), (0.71, 0.96)),
    ((7.02, 0.81), (1.0, 0.16), (0.838, 0.820, 0.696, 0.552), (0.92, 1.00)),
]


@pytest.mark.parametrize(("family", "kind", "accepted", "recovered"), MEASURED)
def test_shared_noise_accepts_nearly_as_often_as_rejection_sampling(family, kind, accepted, recovered):
    """In shape, what was measured before this was built; those pairs came from another family."""
    p, q = pairs(*family, 4000, 1000)
    apart = float((p - q).abs().sum(dim=-1).mean() / 2)
    entropy = float(torch.special.entr(p).sum(dim=-1).mean())
    assert (entropy, apart) == (pytest.approx(kind[0], abs=0.1), pytest.approx(kind[1], abs=0.01))
    shared, recovers = agreement(p, q)
    greedy = float(p.gather(1, q.argmax(dim=-1, keepdim=True)).mean())
    sampled = float((p * q).sum(dim=-1).mean())
    # A draft that is sampled without the target's noise, and its four next best guesses where the target draws another token.
    source = torch.Generator().manual_seed(1)
    drafted, token = (torch.multinomial(x, 1, generator=source) for x in (q, p))
    guesses = q.scatter(1, drafted, 0.0).topk(4).indices
    alone = float((guesses == token).any(dim=-1)[(drafted != token)[:, 0]].float().mean())

    assert (1 - apart, shared, greedy, sampled) == pytest.approx(accepted, abs=0.07)
    assert (alone, recovers) == pytest.approx(recovered, abs=0.08)
    assert 0.87 * (1 - apart) < shared < 1 - apart
    assert shared > greedy + 0.1 and shared > sampled + 0.2 and recovers > alone + 0.1
