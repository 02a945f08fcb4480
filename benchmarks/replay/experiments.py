"""The questions that a replay answers. Each takes a Setting and returns plain records, one a row of a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.prompts import ALL, spec_bench_category
from benchmarks.replay.method import Method, replay
from benchmarks.replay.methods import (
    METHODS,
    NEEDS_PEERS,
    OURS,
    PAPER,
    SUFFIX_TREE,
    Corpus,
    Ours,
    Tiers,
    available,
)
from benchmarks.report.statistics import ratio_of_sums, throughput_ratio
from benchmarks.sources import digest, versions
from benchmarks.traces import Trace

NODES = 16  # of experiments about something else
# Useful without a corpus.
COLD = (OURS, "prompt lookup", "SGLang trie", "SGLang trie, by frequency", *NEEDS_PEERS)
HALVINGS = 6
# A kind's long documents stand for prompts with their answers.
PROMPT, ANSWER = 256, 512  # tokens
ANSWERS = 50  # that are replayed

Documents = Sequence[np.ndarray]


@dataclass(frozen=True)
class Setting:
    """prior: recorded answers to other prompts than those of the traces. language: answers in another language, also to other
    prompts. entries: by whose they are, answers to the same questions, tried on the traces of `entries_category`. kinds: by kind of text
    (benchmarks.sources) its documents."""

    traces: Sequence[Trace]
    prior: Documents
    language: Documents
    entries: dict[str, Documents]
    entries_category: str
    nodes: Sequence[int]
    vocab_size: int
    kinds: dict[str, Documents] = field(default_factory=dict)

    def corpus(self, *parts: Documents) -> Corpus:
        return Corpus([document for part in parts for document in part], vocab_size=self.vocab_size)


@dataclass(frozen=True)
class Replayed:
    """What one method did. Element i of tokens and steps is trace i; nanoseconds and drafted have one a step."""

    tokens: list[int]
    steps: list[int]
    nanoseconds: np.ndarray
    drafted: np.ndarray


def run(method: Method, traces: Iterable[Trace]) -> Replayed:
    """The traces one after another, so each method's memory of earlier answers is the same text."""
    tokens, steps, nanoseconds, drafted = [], [], [], []
    for trace in traces:
        taken = list(replay(method, trace))
        tokens.append(sum(step.tokens for step in taken))
        steps.append(len(taken))
        nanoseconds += [step.nanoseconds for step in taken]
        drafted += [len(step.tree) for step in taken]
    return Replayed(tokens, steps, np.array(nanoseconds), np.array(drafted))


def picks(traces: Sequence[Trace]) -> dict[str, list[int]]:
    """The traces of each category, and of all together, which comes last."""
    found: dict[str, list[int]] = {}
    for place, trace in enumerate(traces):
        found.setdefault(spec_bench_category(trace.category), []).append(place)
    return dict(sorted(found.items())) | {ALL: list(range(len(traces)))}


def rows(traces: Sequence[Trace], got: Replayed, ours: Replayed | None = None) -> list[dict]:
    """One a category: tokens per step; with `ours` also ours over it, paired by trace."""
    found = []
    for category, chosen in picks(traces).items():
        tokens, steps = ([column[i] for i in chosen] for column in (got.tokens, got.steps))
        row = {"category": category, "traces": len(chosen), "tokens_per_step": ratio_of_sums(tokens, steps)}
        if ours is not None:
            own = ([column[i] for i in chosen] for column in (ours.tokens, ours.steps))
            row["ours_over_it"] = throughput_ratio(*own, tokens, steps)
        found.append(row)
    return found


def compared(setting: Setting, corpus: Corpus, names: Sequence[str]) -> list[dict]:
    """Tokens per step of each method at each number of nodes, and how long its draft takes."""
    records = []
    for nodes in setting.nodes:
        ours = None
        for name in names:
            got = run(METHODS[name](corpus, nodes), setting.traces)
            ours = ours or got
            low, middle, high = np.percentile(got.nanoseconds / 1e3, (10, 50, 99)).tolist()
            common = {
                "method": name, "nodes": nodes, "p10_us": low, "p50_us": middle, "p99_us": high,
                "drafted": float(got.drafted.mean()),
            }  # fmt: skip
            records += [common | row for row in rows(setting.traces, got, ours)]
    return records


def methods(setting: Setting) -> list[dict]:
    """All methods with the prior (SSSD, figure 4; Double, table 9: with and without rejected)."""
    return compared(
        setting, setting.corpus(setting.prior), [name for name in available() if name not in PAPER]
    )


def paper(setting: Setting) -> list[dict]:
    """Ours beside SSSD as its paper has it."""
    return compared(setting, setting.corpus(setting.prior), [OURS, *PAPER])


def cold(setting: Setting) -> list[dict]:
    """Those that can draft without a prior, without one."""
    return compared(setting, setting.corpus(), [name for name in COLD if name in available()])


def growing(documents: Documents) -> list[Documents]:
    """None of the documents, then ever twice as many."""
    ends = [len(documents) >> shift for shift in range(HALVINGS, -1, -1)]
    return [documents[:end] for end in dict.fromkeys([0, *ends])]


def with_corpus(corpus: Corpus, traces: Sequence[Trace], **labels: object) -> list[dict]:
    """Ours at NODES with this prior. Live text is left out: what the prior alone adds is the question."""
    got = run(Ours(corpus.segments, corpus.vocab_size, NODES, Tiers(live=False)), traces)
    sizes = {
        "documents": len(corpus.documents),
        "tokens": corpus.tokens,
        "bytes": sum(segment.nbytes for segment in corpus.segments),
    }
    return [labels | sizes | row for row in rows(traces, got)]


def size(setting: Setting) -> list[dict]:
    """A growing corpus (SSSD, figure 5a; Double, table 3)."""
    records = []
    for part in growing(setting.prior):
        records += with_corpus(setting.corpus(part), setting.traces)
    return records


def language(setting: Setting) -> list[dict]:
    """Text in another language, growing from nothing and beside the prior (SSSD, figure 5b)."""
    records = []
    for beside, base in (("nothing", ()), ("the corpus", setting.prior)):
        for part in growing(setting.language):
            labels = {"beside": beside, "added": sum(map(len, part))}
            records += with_corpus(setting.corpus(base, part), setting.traces, **labels)
    return records


def entries(setting: Setting) -> list[dict]:
    """The model's own answers as the prior, and a dataset's to the same questions (SSSD, figure 5c)."""
    traces = [trace for trace in setting.traces if trace.category == setting.entries_category]
    records = []
    for whose, documents in setting.entries.items():
        for part in growing(documents):
            records += with_corpus(setting.corpus(part), traces, answers=whose)
    return [record for record in records if record["category"] != ALL]


def kinds(setting: Setting) -> list[dict]:
    """Ours beside the paper's SSSD and suffix decoding on each kind of text: some documents are prompts with their answers, the others are the prior."""
    records = [row | {"texts": ""} for row in _of_kind(setting, "recorded answers", setting.prior)]
    for kind, documents in setting.kinds.items():
        long = [document for document in documents if len(document) >= PROMPT + ANSWER][:ANSWERS]
        traces = [Trace(kind, each[:PROMPT], each[PROMPT : PROMPT + ANSWER]) for each in long]
        replayed = set(map(id, long))
        others = [document for document in documents if id(document) not in replayed]
        labels = {"texts": digest(documents), "packages": versions(kind)}
        records += [row | labels for row in _of_kind(replace(setting, traces=traces), kind, others)]
    return records


def _of_kind(setting: Setting, kind: str, prior: Documents) -> list[dict]:
    others = [name for name in (*PAPER, SUFFIX_TREE) if name in available()]
    rows = compared(setting, setting.corpus(prior), [OURS, *others])
    return [row | {"category": kind} for row in rows if row["category"] == ALL]


EXPERIMENTS = {
    "methods": methods,
    "cold": cold,
    "size": size,
    "language": language,
    "entries": entries,
    "paper": paper,
    "kinds": kinds,
}
SLOW = ("paper", "kinds")  # asked for by name alone
