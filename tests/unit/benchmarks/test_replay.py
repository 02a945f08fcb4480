"""Every drafting method under one suite, and the arithmetic of a replay."""

import gzip
import json
from functools import partial

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks import sources
from benchmarks.replay import __main__ as command
from benchmarks.replay import peers
from benchmarks.replay.experiments import ANSWER, PROMPT, Setting, growing, kinds, run
from benchmarks.replay.footprint import footprint
from benchmarks.replay.method import Method, chain_of, replay, tree_of
from benchmarks.replay.methods import METHODS, OURS, PAPER, Corpus, available
from benchmarks.replay.sssd import STOP, SubIndex, from_datastore
from benchmarks.replay.tables import tables
from benchmarks.report import plots
from benchmarks.report.records import dumps
from benchmarks.sources import SUFFIXES, digest, source_documents, versions
from benchmarks.traces import Trace, load_traces
from datastore_service.engine.segment import build_segment
from datastore_service.protocol.tree import EMPTY_TREE

VOCABULARY = 1000
RNG = np.random.default_rng(0)
PHRASE = RNG.integers(1, VOCABULARY, 60).astype(np.int32)
SSSD = "SSSD's paper, 4 tokens"
SESSION_METHODS = [OURS, SSSD, "prompt lookup", "SGLang trie", "suffix decoding", "suffix decoding, tree"]
OF_PRIOR = [SSSD, "REST-style", "SGLang trie + corpus", "SGLang trie, warmed", "suffix decoding"]
PRIOR_METHODS = [OURS, f"{OURS}, corpus alone", *OF_PRIOR]
LIVE_METHODS = [OURS, SSSD, f"{OURS}, live alone", "SGLang trie", "suffix decoding, tree"]


@pytest.fixture(autouse=True)
def small_trie(monkeypatch):
    """SGLang allocates its trie at once, for seconds."""
    monkeypatch.setattr(peers, "CAPACITY", 100_000)


def made(name: str, documents=(), nodes: int = 8) -> Method:
    if name not in available():
        pytest.skip("arctic-inference is not installed (make peers)")
    return METHODS[name](Corpus(list(documents), vocab_size=VOCABULARY), nodes)


def unrelated(size: int) -> np.ndarray:
    return RNG.integers(1, VOCABULARY, size).astype(np.int32)


def tokens_per_step(method: Method, trace: Trace) -> float:
    steps = list(replay(method, trace))
    return sum(step.tokens for step in steps) / len(steps)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("nodes", [1, 4, 16])
def test_drafts_are_valid_trees_within_the_budget(name, nodes):
    method = made(name, [PHRASE, unrelated(100)], nodes)
    for output in (PHRASE, np.tile(PHRASE[:5], 20), unrelated(50)):
        trace = Trace("any", np.concatenate([unrelated(5), PHRASE[:20]]), output)
        for step in replay(method, trace):
            step.tree.check_integrity(nodes=nodes)
            assert 1 <= step.tokens <= nodes + 1


@pytest.mark.parametrize("name", METHODS)
def test_every_token_of_an_answer_is_counted_once(name):
    trace = Trace("any", PHRASE[:20], np.concatenate([PHRASE, PHRASE, unrelated(10)]))
    steps = list(replay(made(name, [PHRASE]), trace))
    assert sum(step.tokens for step in steps) == len(trace.output) - 1  # the first comes from the prefill


@pytest.mark.parametrize("name", SESSION_METHODS)
def test_text_of_the_session_is_found(name):
    assert tokens_per_step(made(name), Trace("any", unrelated(5), np.tile(PHRASE, 4))) > 2


@pytest.mark.parametrize("name", PRIOR_METHODS)
def test_text_of_the_prior_is_found(name):
    trace = Trace("any", PHRASE[:5], PHRASE[5:])
    assert tokens_per_step(made(name, [PHRASE]), trace) > 2
    assert tokens_per_step(made(name, [unrelated(60)]), trace) < 1.5


@pytest.mark.parametrize("name", LIVE_METHODS)
def test_an_earlier_answer_is_found(name):
    method = made(name)
    assert tokens_per_step(method, Trace("any", unrelated(5), PHRASE)) < 1.5
    assert tokens_per_step(method, Trace("any", PHRASE[:5], PHRASE[5:])) > 2


@pytest.mark.parametrize(
    "name", [f"{OURS}, session alone", f"{OURS}, corpus alone", "prompt lookup", "REST-style"]
)
def test_an_earlier_answer_is_not_known_without_a_tier_for_it(name):
    method = made(name, [unrelated(50)])
    tokens_per_step(method, Trace("any", unrelated(5), PHRASE))
    assert tokens_per_step(method, Trace("any", PHRASE[:5], PHRASE[5:])) == 1


def test_equal_siblings_become_one():
    tree = tree_of([7, 7, 8, 9], [-1, -1, 1, 0])
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([7, 8, 9], [-1, 0, 0])
    assert len(tree_of([], [])) == 0 and chain_of([3, 4]).parents.tolist() == [-1, 0]


def test_prompt_lookup_takes_the_first_place_of_the_longest_match():
    text = np.array([1, 2, 3, 9, 9, 2, 3, 5, 1, 2, 3], np.int32)
    assert made("prompt lookup", nodes=3).draft(text).tokens.tolist() == [9, 9, 2]


def test_rest_takes_the_most_frequent_beginnings():
    documents = [np.array(row, np.int32) for row in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6])]
    tree = made("REST-style", documents, nodes=2).draft(np.array([8, 1, 2], np.int32))
    assert (tree.tokens[0], tree.parents[0]) == (3, -1)
    assert len(tree) == 2


def test_sssd_reads_at_regular_intervals_and_shortens_the_prefix_until_it_has_enough():
    often = [np.array([1, 2, 3, 10 + i % 2], np.int32) for i in range(250)]
    rare = [np.array([7, 1, 2, 3, 12], np.int32)]
    index = SubIndex(build_segment([*often, *rare], VOCABULARY))
    ((text, cut),) = index.continuations(index.rows(np.array([7, 1, 2, 3])), 4)
    assert text[cut : cut + 2] == [12, STOP]
    assert len(from_datastore([index], np.array([1, 2, 3]))) == 126  # every second of 251
    assert len(from_datastore([index], np.array([7, 1, 2, 3]))) == 1 + 126


def test_sssd_takes_the_largest_estimate_and_damps_what_the_input_proposes():
    """Algorithm 3 by hand: the datastore says 9, then 8; the input, after a match of two, 5 and then 6."""
    method = made(SSSD, [np.array([2, 3, 9, 8], np.int32)], nodes=3)
    tree = method.draft(np.array([2, 3, 5, 6, 1, 2, 3], np.int32))
    assert tree.tokens.tolist() == [9, 8, 5]  # 1, 1 and 0.6 / 2
    assert tree.parents.tolist() == [-1, 0, -1]


def test_paired_ratio_compares_with_ours():
    class Nothing(Method):
        draft = staticmethod(lambda text: EMPTY_TREE)

    got = run(Nothing(), [Trace("any", PHRASE[:3], PHRASE)])
    assert got.tokens == got.steps == [len(PHRASE) - 1]


def test_growing_priors_double_and_start_empty():
    assert list(map(len, growing(range(100)))) == [0, 1, 3, 6, 12, 25, 50, 100]
    assert list(map(len, growing([]))) == [0]


def test_a_kind_is_replayed_on_its_long_documents_and_the_others_are_the_prior():
    repeated, short = np.tile(PHRASE, 13), np.concatenate([unrelated(5), PHRASE])
    assert len(repeated) >= PROMPT + ANSWER > len(short)
    recorded = Trace("any", PHRASE[:5], PHRASE[5:])
    setting = Setting([recorded], [PHRASE], [], {}, "", [4], VOCABULARY, {"web": [short, repeated]})
    rows = kinds(setting)
    assert {(row["category"], row["method"]) for row in rows} >= {
        (kind, name) for kind in ("recorded answers", "web") for name in (OURS, *PAPER)
    }
    (web,) = (row for row in rows if (row["category"], row["method"]) == ("web", OURS))
    assert web["traces"] == 1 and web["tokens_per_step"].value > 4
    assert web["packages"] == versions("web") and web["texts"] == digest([short, repeated])
    shown = "\n".join(tables(json.loads(dumps({"results": {"kinds": rows}}))))
    assert f"- web: kubernetes_validate {versions('web')['kubernetes_validate']}" in shown


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def test_a_text_is_the_same_every_time_and_of_packages_that_are_there(byte_tokenizer):
    documents = source_documents(byte_tokenizer, 20_000, kind="prose")
    assert sum(map(len, documents)) >= 20_000
    assert digest(documents) == digest(source_documents(byte_tokenizer, 20_000, kind="prose"))
    assert digest(documents) != digest(documents[::-1])
    assert all(versions(kind) for kind in SUFFIXES)


def test_more_text_than_there_is_is_refused(byte_tokenizer, monkeypatch):
    monkeypatch.setitem(sources.PACKAGES, "prose", ("ray",))
    with pytest.raises(
        ValueError, match=r"^tokens: the packages' prose files hold \d+, 1000000000 are wanted"
    ):
        source_documents(byte_tokenizer, 10**9, kind="prose")


def test_footprint_measures_an_index_in_a_process_of_its_own():
    """Ours alone: SGLang's trie allocates 1.9 GB at once there."""
    (row,) = footprint([unrelated(400_000)], VOCABULARY, [OURS])
    assert row["tokens"] == 400_000
    assert 2 < row["bytes_per_token"] < 20


@pytest.fixture
def recorded(tmp_path):
    def write(name: str, categories: dict[str, int]):
        prompt = PHRASE[:9].tolist()
        rows = [
            {"category": category, "prompt_tokens": prompt, "tokens": np.tile(PHRASE, 2)[i:].tolist()}
            for category, count in categories.items()
            for i in range(count)
        ]
        path = tmp_path / name
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write


def test_command_writes_tables_plots_and_a_manifest(recorded, tmp_path, capsys):
    traces, prior = recorded("traces.jsonl.gz", {"a": 3, "b": 2}), recorded("prior.jsonl", {"own": 4})
    out = tmp_path / "out" / "replay.json"
    files = ["--traces", str(traces), "--prior", str(prior), "--language", str(prior)]
    asked = [
        "--experiments",
        "cold",
        "paper",
        "size",
        "language",
        "entries",
    ]  # the last needs --dataset and is left out
    command.main([*files, "--nodes", "4", "8", *asked, "--json", str(out)])
    assert "ours over the strongest other" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert set(report["manifest"]["prompts"]) == {"traces.jsonl.gz", "prior.jsonl"}
    assert {row["category"] for row in report["results"]["cold"]} == {"a", "b", "all"}
    assert {row["method"] for row in report["results"]["paper"]} == {OURS, SSSD, "SSSD's paper, 32 tokens"}
    assert report["results"]["size"][0]["documents"] == 0
    plots.draw("replay", report, out.parent)
    assert {path.name for path in out.parent.glob("*.png")} == {
        f"replay-{name}.png" for name in ("cold", "paper", "size", "language")
    }


def test_traces_of_each_category_are_mixed_in_the_same_order_every_time(recorded):
    traces = load_traces(recorded("t.jsonl", {"a": 5, "b": 5}))
    order = partial(command.chosen, traces, 3)
    assert [t.category for t in order(0)] == [t.category for t in order(0)]
    assert sorted(t.category for t in order(1)) == ["a"] * 3 + ["b"] * 3


def test_a_file_without_token_ids_is_named(tmp_path):
    path = tmp_path / "old.jsonl"
    path.write_text('{"category": "a", "prompt": "p"}\n')
    with pytest.raises(ValueError, match=r"old.jsonl:1: no field prompt_tokens"):
        load_traces(path)


def test_setting_corpus_joins_its_parts():
    setting = Setting([], [PHRASE], [PHRASE[:5]], {}, "", [8], VOCABULARY)
    assert setting.corpus(setting.prior, setting.language).tokens == 65
