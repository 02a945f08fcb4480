"""The load on a datastore service: what is said, what is measured, what is concluded; and a short one on a real service."""

import json
import time
from array import array
from collections import Counter

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from benchmarks.load import __main__ as command
from benchmarks.load import engine as load_engine
from benchmarks.load.clients import Clients, shares
from benchmarks.load.engine import Engine, Level, Taken, Texts
from benchmarks.load.levels import RAISE, excess, exhausted, figures, search, thinned
from benchmarks.report import plots
from benchmarks.report.page import tables_of
from benchmarks.traces import SHIPPED, Trace, load_traces
from datastore_service.client.base import DatastoreError
from datastore_service.client.remote import GrpcDatastore
from datastore_service.engine.limits import Limits
from datastore_service.protocol.tree import EMPTY_TREE
from datastore_service.protocol.types import Namespace, Reply, Status
from tests.unit.server.service import VOCAB, running

SECONDS = 60.0


def trace(prompt, output):
    return Trace("any", np.array(prompt, np.int32), np.array(output, np.int32))


# Every answer has 1 and 2; the third token is its own, twice.
TRACES = [trace([1, 10 + i], [2, 100 + i, 3, 100 + i, 2, 1]) for i in range(8)]
TRACES = [trace(one.prompt, np.tile(one.output, 4)) for one in TRACES]


def test_a_text_is_the_same_for_a_seed_and_another_for_each_session():
    first, again, other = (Texts(TRACES, VOCAB, seed) for seed in ((0, 1), (0, 1), (0, 2)))
    texts = [first.next() for _ in range(20)]
    assert all(
        (a == b).all() and m == n
        for (a, m), (b, n) in zip(texts, (again.next() for _ in range(20)), strict=True)
    )
    assert any(
        len(a) != len(b) or (a != b).any()
        for (a, _), (b, _) in zip(texts, (other.next() for _ in range(20)), strict=True)
    )


def test_shared_tokens_keep_their_ids_and_own_ones_still_repeat():
    own = set()
    texts = Texts(TRACES, VOCAB, (7,))
    for _ in range(40):
        text, prompt = texts.next()
        assert prompt == 2 and text.dtype == np.int32 and 0 <= text.min() <= text.max() < VOCAB
        assert (text[0], text[2], text[4], text[-1]) == (1, 2, 3, 1)
        assert text[3] == text[5]
        own.add(int(text[3]))
    assert len(own) > 30


def test_recorded_answers_differ_between_sessions_but_for_their_shared_tokens():
    texts = Texts(load_traces(SHIPPED), 49152, (0,))
    said = [texts.next()[0] for _ in range(50)]
    windows = Counter(
        window for text in said for window in {tuple(text[i : i + 8]) for i in range(len(text) - 8)}
    )
    assert max(windows.values()) > 1  # the chat's frame
    assert sum(count > 1 for count in windows.values()) < 0.3 * len(windows)


class Clock:
    """Stands still but while somebody sleeps. oversleeps: seconds, by the number of the sleep."""

    def __init__(self, oversleeps=None):
        self.now, self.sleeps, self.oversleeps = 100.0, 0, oversleeps or {}

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds + self.oversleeps.get(self.sleeps, 0.0)
        self.sleeps += 1


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(load_engine, "time", made)
    return made


class Answering:
    """Answers with empty trees, after `seconds` of the clock. statuses: of the next entries, OK where none is left."""

    def __init__(self, clock, seconds=0.0, statuses=(), broken=0):
        self.clock, self.seconds, self.statuses, self.broken = clock, seconds, list(statuses), broken
        self.messages, self.times, self.connects = [], [], 0

    def wait_connected(self, timeout):
        self.connects += 1
        return True

    def step(self, entries, deadline):
        if self.broken:
            self.broken -= 1
            raise DatastoreError("gone")
        self.messages.append(entries)
        self.times.append(self.clock.now)
        self.clock.now += self.seconds
        statuses = [self.statuses.pop(0) if self.statuses else Status.OK for _ in entries]
        return [Reply(status, 0, EMPTY_TREE) for status in statuses]


def engine(datastore, sessions=2, deadline=1.0):
    return Engine("e", datastore, Texts(TRACES, VOCAB, (0,)), sessions, 4, deadline)


def test_steps_come_at_their_rate_from_the_phase_on(clock):
    answering = Answering(clock)
    start = clock.now + 0.05
    taken = engine(answering).run(Level(50.0, start, start + 0.4), phase=0.5)
    assert answering.times == pytest.approx([start + 0.01 + 0.02 * step for step in range(20)])
    assert list(taken.late) == pytest.approx([0.0] * 20)
    assert list(taken.latencies) == pytest.approx([0.0] * 20)


def test_a_late_client_catches_up(clock):
    """It oversleeps once: the steps that were due meanwhile follow at once, and are late."""
    clock.oversleeps = {5: 0.2}
    taken = engine(Answering(clock)).run(Level(50.0, clock.now, clock.now + 0.79), phase=0.0)
    caught_up = [0.2 - 0.02 * step for step in range(10)]
    assert list(taken.late) == pytest.approx([0.0] * 5 + caught_up + [0.0] * 25, abs=1e-9)


def test_a_slow_answer_delays_the_next_step_and_is_not_the_clients_lateness(clock):
    answering = Answering(clock, seconds=0.1)
    taken = engine(answering, deadline=0.05).run(Level(50.0, clock.now, clock.now + 0.45), phase=0.0)
    assert list(taken.latencies) == pytest.approx([0.1] * 5)
    assert list(taken.late) == pytest.approx([0.0] * 5, abs=1e-9)
    assert taken.missed == 5 and taken.tokens == taken.session_steps == 10


def test_a_refused_session_is_counted_and_replaced(clock):
    answering = Answering(clock, statuses=[Status.OK, Status.OVER_BUDGET])
    taken = engine(answering).run(Level(100.0, clock.now, clock.now + 0.1), phase=0.0)
    assert taken.refused == {"OVER_BUDGET": 1}
    (_, refused), (kept, new) = answering.messages[0], answering.messages[1]
    assert kept.opening is None
    assert new.session != refused.session and new.opening is not None and new.start == 0


def test_a_stream_that_ends_is_counted_and_its_sessions_begin_anew(clock):
    answering = Answering(clock, broken=1)
    taken = engine(answering).run(Level(100.0, clock.now, clock.now + 0.1), phase=0.0)
    assert (taken.broken, answering.connects) == (1, 1)
    assert all(entry.opening is not None for entry in answering.messages[0])


def test_sessions_end_and_others_take_their_place_on_a_real_service():
    with running(engine_limits=Limits(sessions=8)) as service:
        datastore = GrpcDatastore(service.endpoint, Namespace("load", "0" * 64), vocab_size=VOCAB)
        one = engine(datastore, sessions=4, deadline=SECONDS)
        one.open()
        (hosted,) = service.namespaces
        taken, limit = Taken(), time.monotonic() + SECONDS
        while not (stats := hosted.engine.stats()).tiers[2].tokens:
            start = time.monotonic()
            assert start < limit, "no closed session's output is in the live tier"
            taken.add(one.run(Level(200.0, start, start + 1.0), phase=0.0))
        datastore.close()
    assert taken.refused == {} and taken.broken == taken.missed == 0
    assert taken.tokens > taken.session_steps > 0  # drafts were accepted
    assert 4 <= stats.sessions <= 8


def test_streams_are_shared_evenly():
    assert shares(64, 4) == [range(16), range(16, 32), range(32, 48), range(48, 64)]
    assert [len(share) for share in shares(5, 2)] == [2, 3]
    assert shares(2, 4) == [range(1), range(1, 2)]


def level(**more):
    return {
        "rate": 10.0, "achieved": 10.0, "steps": 100, "p50_ms": 2.0, "p99_ms": 5.0, "p999_ms": 6.0, "longest_ms": 7.0,
        "late_p50_ms": 0.1, "late_p99_ms": 0.5, "steps_per_second": 640.0, "tokens_per_second": 9000.0,
        "session_steps_per_second": 4000.0, "tokens_per_step": 2.25, "missed": 3, "refused": {}, "broken": 0,
        "service_cores": 0.5, "client_cores": 0.5, "machine_busy": 0.5, "cores": 2, "service_ms": 1.5,
        "service_engine_ms": 1.0, "refused_calls": 0.0, "rebuilds": 4, "sessions": 4096,
        "resident_first": 100 << 20, "resident_last": 120 << 20, "resident_most": 130 << 20,
    } | more  # fmt: skip


def test_figures_of_a_level():
    taken = Taken(array("d", [0.001] * 99 + [0.1]), array("d", [0.0] * 100), 400, 200, Counter(GAP=1), 1, 0)
    found = figures(taken, rate=5.0, streams=2, seconds=10.0)
    assert (found["achieved"], found["steps_per_second"], found["tokens_per_second"]) == (5.0, 10.0, 40.0)
    assert (found["p50_ms"], found["tokens_per_step"], found["refused"]) == (
        pytest.approx(1.0),
        2.0,
        {"GAP": 1},
    )
    assert 1 < found["p99_ms"] < found["p999_ms"] < found["longest_ms"] == pytest.approx(100.0)
    with pytest.raises(ValueError, match="rate: no step was taken in 1 s at 0.1 steps per second"):
        figures(Taken(), 0.1, 1, 1.0)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, ""),
        ({"p99_ms": 10.5}, "p99 10.5 ms is above 10 ms"),
        ({"late_p99_ms": 10.5}, "steps were sent 10.5 ms (p99) after they were due"),
        ({"achieved": 9.4}, "9.4 of 10.0 steps per second were taken"),
        ({"refused": {"OVER_BUDGET": 2}}, "2 entries were refused, 0 streams ended"),
        ({"broken": 1}, "0 entries were refused, 1 streams ended"),
    ],
)
def test_what_is_beyond_the_limit(more, reason):
    assert excess(level(**more), bound=10.0) == reason


@pytest.mark.parametrize(
    ("more", "resource"),
    [
        ({"machine_busy": 0.95, "service_cores": 1.0, "client_cores": 0.6}, "the machine's processors: service 1.00, clients 0.60, others 0.30 of 2"),
        ({"client_cores": 3.7, "cores": 16}, "the clients and not the service"),
        ({"late_p99_ms": 5.1}, "the clients and not the service"),
        ({"service_cores": 0.93, "cores": 16}, "the service's interpreter"),
        ({}, "none that was watched"),
    ],
)  # fmt: skip
def test_the_resource_at_its_end(more, resource):
    assert exhausted(level(**more), processes=4).startswith(resource)


def test_the_rate_is_raised_until_it_is_beyond_the_limit_twice_in_turn():
    disturbed = []

    def measure(rate):
        slow = rate > 20 or (rate > 10 and not disturbed and disturbed.append(rate) is None)
        return level(rate=rate, achieved=rate, p99_ms=12.0 if slow else 4.0)

    levels, beyond = search(measure, 10.0, bound=10.0)
    assert [round(one["rate"] / 10, 3) for one in levels] == [1, RAISE, RAISE, 1.562, 1.953, 2.441, 2.441]
    assert beyond == "p99 12.0 ms is above 10 ms"


def test_a_limit_that_is_not_found_is_none():
    levels, beyond = search(lambda rate: level(rate=rate, achieved=rate), 1.0, bound=10.0)
    assert len(levels) == 40 and beyond == ""


def test_samples_are_thinned_to_their_ends():
    samples = [{"seconds": i} for i in range(601)]
    kept = [sample["seconds"] for sample in thinned(samples, 121)]
    assert len(kept) == 121 and (kept[0], kept[-1]) == (0, 600)
    assert thinned(samples[:3], 121) == samples[:3]


SETTINGS = {"streams": 64, "sessions": 4096, "nodes": 4, "deadline_ms": 5.0, "p99_ms": 10.0}
SAMPLES = [
    {
        "seconds": 60.0 * i, "resident_bytes": (100 + 2 * i) << 20, "machine_busy": 0.5, "live_tokens": 1000 * i,
        "live_segments": i % 4, "segments_written": i, "sessions": 4096, "streams": 64,
    }
    for i in range(21)
]  # fmt: skip


def record(levels, limit, samples):
    manifest = {"command": "load", "settings": SETTINGS}
    return {"manifest": manifest, "levels": levels, "limit": limit, "samples": samples}


def test_the_tables_and_the_picture_of_a_steady_load(tmp_path):
    steady = record([level(refused={"GAP": 1})], {}, SAMPLES)
    text = "\n".join(tables_of(steady))
    assert "64 streams with 4,096 sessions in all" in text
    assert (
        "| 10.0 | 10.0 | 2.00 | 5.00 | 6.00 | 7.0 | 0.50 | 640 | 9000 | 2.25 | 3 of 100 | 1 GAP | 0 | 0 |"
        in text
    )
    assert "| 50% of 2 | 4096 | 4 | 100 | 120 | 130 |" in text
    assert "| 20.0 | 140 | 20,000 | 0 | 20 |" in text and "It carries" not in text
    ((_, figure),) = plots.load(steady)
    assert [round(axes.get_ylim()[0]) for axes in figure.axes] == [0, 0]
    assert figure.axes[0].get_ylim()[1] > 140 and figure.axes[1].get_ylim()[1] < 0.1
    plots.draw("steady", steady, tmp_path)
    assert (tmp_path / "steady.png").stat().st_size > 1000


def test_the_tables_and_the_picture_of_a_search(tmp_path):
    levels = [level(), level(rate=12.5, p99_ms=12.0), level(rate=12.5, p99_ms=13.0)]
    found = record(
        levels, {"beyond": "p99 13.0 ms is above 10 ms", "exhausted": "the machine's processors"}, []
    )
    text = "\n".join(tables_of(found))
    assert (
        "It carries 10.0 steps per second of each stream (9000 tokens per second). At 12.5, twice in turn: p99 13.0 ms is above"
        " 10 ms. Saturated: the machine's processors." in text
    )
    plots.draw("search", found, tmp_path)
    assert (tmp_path / "search.png").stat().st_size > 1000
    first = record(levels[1:], {"beyond": "p99", "exhausted": "x"}, [])
    assert "It does not carry the lowest rate" in "\n".join(tables_of(first))
    endless = record(levels[:1], {"beyond": "", "exhausted": ""}, [])
    assert "No limit was found up to 10.0 steps" in "\n".join(tables_of(endless))


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    """Of as many words as the recorded answers' vocabulary has."""
    file = tmp_path_factory.mktemp("words") / "tokenizer.json"
    Tokenizer(WordLevel({f"w{i}": i for i in range(49152)}, unk_token="w0")).save(str(file))
    return file


def test_a_short_load_on_a_real_service(tokenizer_file, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "SETTLE_SECONDS", 0.5)
    levels, run = [], Clients.run
    monkeypatch.setattr(Clients, "run", lambda self, level: levels.append(level) or run(self, level))
    words = (
        "--streams 4 --sessions 64 --processes 2 --rate 10 --minutes 0.1 --millions 0.001 --deadline-ms 60000"
    )
    command.main([*words.split(), "--tokenizer", str(tokenizer_file), "--json", str(tmp_path / "load.json")])
    found = json.loads((tmp_path / "load.json").read_text())
    (one,) = found["levels"]
    offered = [(level.rate, level.end - level.start) for level in levels]
    assert offered == [(10.0, pytest.approx(0.5)), (10.0, pytest.approx(6.0))]
    assert 4 <= one["steps"] <= 4 * 60
    assert one["tokens_per_step"] > 1 and one["refused"] == {} and (one["missed"], one["broken"]) == (0, 0)
    assert 0 < one["service_engine_ms"] < one["service_ms"] < one["longest_ms"]
    assert one["service_cores"] > 0 and one["client_cores"] > 0
    assert [sample["streams"] for sample in found["samples"]] == [4] * len(found["samples"])
    assert 64 <= one["sessions"] <= 128 and one["resident_most"] > 50 << 20
    assert found["manifest"]["settings"]["traces"] == ["traces.jsonl.gz"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rate 0", "--rate: 0.0 is not above 0"),
        ("--sessions 100", "--sessions: 100 is not a multiple of the 64 streams"),
        ("--sessions 65536", "--sessions: 1024 of a stream exceed 512"),
        ("--traces none.jsonl", "--traces: none.jsonl: no such file"),
    ],
)
def test_bad_settings_are_refused(words, message, tokenizer_file, capsys):
    with pytest.raises(SystemExit):
        command.main([*words.split(), "--tokenizer", str(tokenizer_file)])
    assert message in capsys.readouterr().err


def test_answers_of_another_vocabulary_are_refused(tmp_path, capsys):
    file = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(file))
    with pytest.raises(SystemExit, match="load: traces: id 48923 is not below the tokenizer's 2"):
        command.main(["--tokenizer", str(file)])
    with pytest.raises(SystemExit, match="^2$"):
        command.main(["--tokenizer", str(tmp_path / "none.json")])
    assert capsys.readouterr().err.endswith("none.json: no such file\n")
