"""The channel to a draft process, with real processes that are killed, stopped, started again and lied about."""

import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from sglang_patches.drafting import channel as channels
from sglang_patches.drafting.channel import (
    DROPPED,
    LATE_SECONDS,
    READY_SECONDS,
    RESTARTS,
    STALL_SECONDS,
    UP,
    Backoff,
    ProcessChannel,
)
from sglang_patches.drafting.seams import Patience
from sglang_patches.exchange.connection import SOCKET_VARIABLE, ParentConnection
from sglang_patches.exchange.messages import Closed, Committed, Growth, Lost, Opened, Verifying
from tests.unit.drafting.test_speculation import Run
from tests.waiting import eventually

ROOT = Path(__file__).parents[3]
SECONDS = 60  # of patience with a busy machine
QUICK = Backoff(0.01, 0.05, 60.0)
PROGRAMS = "tests.support.draft_programs"


class Clock:
    """The channels' time, which stands still until it is moved. seen: at which the channel last waited in vain."""

    def __init__(self):
        self.now, self.seen = 1000.0, 0.0

    def monotonic(self):
        return self.now

    def move(self, seconds):
        """Returns once the channel has seen it."""
        self.now += seconds
        eventually(lambda: self.seen >= self.now, "the channel does not look at its clock", SECONDS)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()

    class Patient(channels.Peer):
        """Waits by the clock."""

        def receive(self, seconds):
            limit = clock.now + seconds
            while True:
                now = clock.now
                try:
                    return super().receive(0.01)
                except TimeoutError:
                    clock.seen = now
                    if now >= limit:
                        raise

    monkeypatch.setattr(channels, "Peer", Patient)
    monkeypatch.setattr(channels, "time", clock)
    return clock


def command_for(program, *arguments):
    return [sys.executable, "-m", PROGRAMS, program, *arguments]


@pytest.fixture
def start(tmp_path, clock):
    channels = []

    def start(program, *arguments, backoff=QUICK):
        environment = {"PYTHONPATH": str(ROOT)}
        channel = ProcessChannel(
            command_for(program, *arguments), environment, tmp_path / "draft.log", backoff
        )
        channels.append(channel)
        return channel

    yield start
    for channel in channels:
        channel.close()


def draft_process():
    """The running one of this process."""
    (found,) = draft_processes()
    return found


def draft_processes(parent=None):
    """parent: its pid."""
    children = psutil.Process(parent).children(recursive=True)
    return [child for child in children if PROGRAMS in command_of(child)]


def command_of(process):
    """[] of one that has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def kill(then=lambda: None):
    """Returns once the channel knows; it may have started another one by then."""
    eventually(lambda: UP._value.get() == 1, "none is ready", SECONDS)
    restarts = RESTARTS._value.get()
    draft_process().kill()
    then()
    eventually(
        lambda: UP._value.get() == 0 or RESTARTS._value.get() > restarts,
        "the channel has not noticed",
        SECONDS,
    )


def opened(session, size=3, epoch=1):
    return Opened(session, np.arange(size, dtype=np.int32), epoch)


def committed(session, start, size=1):
    return Committed(session, start, np.full(size, 7, np.int32), 1)


def collect_until(channel, enough):
    """All answers up to and with those after which `enough(answers)` is true."""
    answers, limit = [], time.monotonic() + SECONDS
    while not enough(answers):
        assert time.monotonic() < limit, answers
        answers += channel.collect(1.0)
    return answers


def lost(answers):
    return {answer.session for answer in answers if isinstance(answer, Lost)}


def growths(answers):
    return [answer for answer in answers if isinstance(answer, Growth)]


def told_of(channel, *messages):
    """Posts the messages again and again until the draft process says that it has none of their sessions."""
    answers, limit = [], time.monotonic() + SECONDS
    while lost(answers) != {message.session for message in messages}:
        assert time.monotonic() < limit, answers
        channel.post(messages)
        answers += channel.collect(0.001)


def dropped(reason):
    return DROPPED.labels(reason)._value.get()


# Messages and answers


def test_messages_arrive_in_order_and_answers_come_back(start):
    channel = start("echo")
    channel.post([opened("s", epoch=-1)])
    begin = 0
    for size in [1, 2, 50, 1, 3, 0, 200, 1, 1] * 5:
        channel.post([committed("s", begin + at) for at in range(size)])
        begin += size
    answers = collect_until(channel, lambda answers: len(answers) > begin)
    assert [answer.epoch for answer in answers] == list(range(-1, begin))
    assert channel.ready.tokens == 1000 and channel.collect(0.0) == []


def test_frames_that_are_larger_than_the_socket_do_not_block_either_side(start, monkeypatch):
    monkeypatch.setattr(channels, "MOST", 1 << 24)
    channel = start("echo")
    for number in range(8):
        channel.post([opened(f"s{number}", 1_000_000)])
    answers = collect_until(channel, lambda answers: len(answers) == 8)
    assert all(np.array_equal(answer.tokens, np.arange(1_000_000)) for answer in answers)


def test_a_collection_that_would_be_empty_takes_no_lock(start):
    channel = start("echo")
    with channel._changed:
        found = []
        thread = threading.Thread(target=lambda: found.append(channel.collect(0.0)))
        thread.start()
        thread.join(SECONDS)
        assert found == [[]]


def test_answers_that_nobody_collects_are_bounded(start, monkeypatch):
    monkeypatch.setattr(channels, "MOST", 20)  # ten answers of one node
    channel = start("echo")
    before = dropped("uncollected")
    channel.post([opened("s")] + [committed("s", start) for start in range(40)])
    eventually(lambda: dropped("uncollected") == before + 31, seconds=SECONDS)
    assert [answer.epoch for answer in channel.collect(0.0)] == list(range(30, 40))


def has(answers, session, number):
    return any(isinstance(a, Growth) and (a.session, a.epoch) == (session, number) for a in answers)


# Answers that nobody has collected: bounded by answers and nodes, the newest stay


def growth(number, nodes):
    return Growth(
        "s", number, 0, *(np.zeros(nodes, kind) for kind in (np.int64, np.int64, np.int32, np.float32))
    )


def test_answers_come_in_order_and_once():
    box = channels.Inbox()
    answers = [growth(1, 3), Lost("s", 1), growth(2, 0)]
    assert [box.put(answer) for answer in answers] == [0, 0, 0] and len(box) == 3
    assert box.take() == answers and not box and box.take() == []


def test_many_small_answers_and_few_large_ones_are_bounded(monkeypatch):
    monkeypatch.setattr(channels, "MOST", 30)
    box = channels.Inbox()
    assert sum(box.put(Lost(str(i), 1)) for i in range(50)) == 20
    assert box.put(growth(1, 19)) == 20 and len(box) == 11
    assert box.put(growth(2, 1000)) == 12 and box.take() == []
    assert box.put(growth(3, 29)) == 0 and box.put(Lost("s", 1)) == 1
    assert [answer.session for answer in box.take()] == ["s"]


# Deaths


def test_twenty_kills_in_a_row(start):
    channel = start("echo", backoff=Backoff(0.01, 0.01, 60.0))
    channel.post([opened("a"), opened("b"), opened("gone"), Closed("gone")])
    down, restarts = dropped("down"), RESTARTS._value.get()
    for round_ in range(20):
        kill()
        told_of(
            channel, committed("a", 3), Verifying("b", 1, *[np.zeros(1, np.int64)] * 2, np.zeros(1, np.int32))
        )
        channel.post([opened("b", epoch=round_), opened("a", epoch=round_)])
        answers = growths(collect_until(channel, lambda answers: len(growths(answers)) == 2))
        assert [(answer.session, answer.epoch) for answer in answers] == [("b", round_), ("a", round_)]
    assert dropped("down") > down and RESTARTS._value.get() == restarts + 20


def test_decoding_goes_on_over_kills_and_drafts_come_back(start):
    channel = start("drafting")
    run = Run(channel)
    run.patience = lambda states, missed: Patience(0.2)
    for _ in range(3):
        assert drafts_well(run)
        kill(lambda: run.commit(run.step()))
    assert drafts_well(run)


def drafts_well(run):
    limit = time.monotonic() + SECONDS
    while time.monotonic() < limit:
        if run.tokens_a_step(5) > 2:
            return True
        time.sleep(0.01)  # the texts should not grow long meanwhile
    return False


def test_what_a_dead_process_has_said_is_harmless(start):
    channel = start("drafting")
    run = Run(channel)
    run.patience = lambda states, missed: Patience(0.2)
    assert drafts_well(run)
    late, collect = [], channel.collect
    channel.collect = lambda seconds: late.extend(collect(seconds)) or []
    while not late:
        run.commit(run.step())
        time.sleep(0.01)
    kill()
    channel.collect = lambda seconds: [late.pop(0), *collect(seconds)] if late else collect(seconds)
    while late:
        run.commit(run.step())
    assert drafts_well(run)


def test_nothing_is_waited_for_while_the_draft_process_is_down(start):
    channel = start("echo", backoff=Backoff(3600.0, 3600.0, 60.0))
    waiting = threading.Thread(target=channel.collect, args=(3600.0,), daemon=True)
    waiting.start()
    kill()
    waiting.join(SECONDS)
    assert not waiting.is_alive() and channel.collect(3600.0) == []


def test_a_draft_process_that_sends_garbage_counts_as_dead(start, caplog):
    channel, restarts = start("babbling"), RESTARTS._value.get()
    channel.post([opened("s")])
    eventually(lambda: RESTARTS._value.get() == restarts + 1, seconds=SECONDS)
    assert "no frame begins with b'Hello, world'" in caplog.text and "was killed" in caplog.text


def test_a_child_of_the_draft_process_that_has_its_socket_hides_no_death(start):
    channel, restarts = start("forking"), RESTARTS._value.get()
    child = eventually_one(lambda: [child for child in draft_processes() if child.ppid() != os.getpid()])
    channel.post([opened("s")])
    eventually(lambda: RESTARTS._value.get() == restarts + 1, seconds=SECONDS)
    eventually(lambda: ended(child.pid), "the child of the dead one lives", SECONDS)


def eventually_one(find):
    found = []
    eventually(lambda: found.extend(find()) or found, seconds=SECONDS)
    return found[0]


def test_what_is_logged_of_a_death_and_a_return(start, caplog, tmp_path):
    caplog.set_level(logging.INFO, channels.__name__)
    start("once", str(tmp_path / "starts"), backoff=Backoff(0.01, 0.05, 60.0))
    kill()
    eventually(lambda: len(deaths(caplog)) >= 5, seconds=SECONDS)
    first, second, *_ = deaths(caplog)
    assert "ended with status -9" in first and "ended with status 1" in second
    assert "the device is taken" in second and "the device is taken" not in first
    delays = [float(re.search(r"again in ([\d.]+) s", death)[1]) for death in deaths(caplog)[:5]]
    assert delays == [0.01, 0.02, 0.04, 0.05, 0.05]
    (tmp_path / "starts").unlink()
    eventually(lambda: UP._value.get() == 1, seconds=SECONDS)
    assert caplog.text.count("is ready after 0.5 s, 1000 KV slots") == 2


def deaths(caplog):
    return [message for message in caplog.messages if "again in" in message]


def test_the_delay_is_short_again_after_good_health(start, caplog):
    start("echo", backoff=Backoff(0.01, 1.0, healthy=0.0))
    for _ in range(3):
        kill()
        eventually(lambda: UP._value.get() == 1, seconds=SECONDS)
    assert [message.count("again in 0.01 s") for message in deaths(caplog)] == [1, 1, 1]


# A draft process that hangs


def test_a_process_that_does_not_read_is_started_again(start, clock, caplog):
    channel = start("echo")
    channel.post([opened("a"), opened("b")])
    collect_until(channel, lambda answers: len(answers) == 2)
    restarts, down = RESTARTS._value.get(), dropped("down")
    hung = draft_process()
    hung.suspend()
    for _ in range(100):  # the last message is young, the first is not
        channel.post([committed("a", 3, size=10_000)])
        clock.now += STALL_SECONDS / 101
    assert channel.collect(0.0) == [] and RESTARTS._value.get() == restarts
    clock.move(STALL_SECONDS / 50)
    told_of(channel, committed("a", 3), committed("b", 3))
    assert ended(hung.pid)
    assert "was killed because it had not answered for 30 s" in caplog.text
    assert RESTARTS._value.get() == restarts + 1 and dropped("down") > down
    channel.post([opened("a", epoch=-2), committed("a", 6)])
    answers = collect_until(channel, lambda answers: has(answers, "a", 6))
    assert [answer.epoch for answer in growths(answers)] == [-2, 6]


def test_one_small_message_is_enough_to_find_a_hang(start, clock):
    """It fits into the socket; and nobody posts or collects any more."""
    channel, restarts = start("echo"), RESTARTS._value.get()
    draft_process().suspend()
    clock.move(2 * STALL_SECONDS)  # with nothing to say, silence is no fault
    channel.post([opened("a")])
    clock.move(STALL_SECONDS - 1)
    assert RESTARTS._value.get() == restarts
    clock.move(1)
    eventually(lambda: RESTARTS._value.get() == restarts + 1, "it was not killed", SECONDS)


def test_a_process_that_reads_and_then_hangs_is_started_again(start, clock, tmp_path):
    channel, restarts = start("stuck"), RESTARTS._value.get()
    channel.post([opened("a")])
    eventually(lambda: (tmp_path / "draft.log").read_text() == "read\n", seconds=SECONDS)
    clock.move(STALL_SECONDS)
    eventually(lambda: RESTARTS._value.get() == restarts + 1, "it was not killed", SECONDS)


@pytest.mark.clock
def test_a_process_that_has_nothing_to_answer_says_something_every_second(tmp_path):
    """`drafting` answers no `Closed`, but says that it lives: also while more messages follow all the time."""
    channel = ProcessChannel(command_for("drafting"), {"PYTHONPATH": str(ROOT)}, tmp_path / "draft.log")
    restarts = RESTARTS._value.get()
    received, closed = channels.BYTES.labels("received")._value, Closed("nobody's")
    try:
        for following in ([], [], [closed]):
            before, began = received.get(), time.monotonic()
            channel.post([closed])
            while received.get() == before and time.monotonic() < began + LATE_SECONDS:
                time.sleep(0.01)
                channel.post(following)
            assert time.monotonic() - began < 1.2
        assert RESTARTS._value.get() == restarts and channel.collect(0.0) == []
    finally:
        channel.close()


def test_a_process_that_is_late_is_not_waited_for(start, clock):
    channel = start("echo")
    process = draft_process()
    process.suspend()
    channel.post([opened("a")])
    clock.now += LATE_SECONDS
    assert not channel._silent
    clock.now += 0.1
    assert channel._silent and channel.collect(3600.0) == []
    process.resume()
    collect_until(channel, lambda answers: has(answers, "a", 1))


def test_posting_never_blocks_and_each_message_is_sent_or_counted_as_dropped(start):
    channel = start("echo")
    process, sent = draft_process(), channels.MESSAGES.labels("sent")._value
    before = sent.get() + dropped("down")
    process.suspend()
    for _ in range(100):
        channel.post([opened("s", 100_000), committed("s", 3)])
    process.kill()
    eventually(lambda: sent.get() + dropped("down") == before + 200, seconds=SECONDS)


def test_a_stopped_draft_process_is_ended(start, monkeypatch):
    monkeypatch.setattr(channels, "STOP_SECONDS", 0.1)
    channel = start("echo")
    process = draft_process()
    process.suspend()
    for _ in range(100):
        channel.post([opened("s", 100_000)])
    channel.close()
    assert ended(process.pid)


# Start


def test_a_refusal_at_the_start_is_shown(start):
    with pytest.raises(RuntimeError, match=r"(?s)status 1 .*the tokenizer differs from the target's"):
        start("refusing")


def test_a_start_that_takes_too_long(tmp_path, clock):
    log = tmp_path / "draft.log"
    command = ["sh", "-c", "echo loading $$; exec sleep 3600"]
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(ProcessChannel, command, {}, log)
        eventually(lambda: log.exists() and log.read_text().endswith("\n"), seconds=SECONDS)
        clock.move(READY_SECONDS - 1)
        assert not starting.done()
        clock.move(1)
        with pytest.raises(RuntimeError, match=r"(?s)not ready after 600 s .*loading"):
            starting.result()
    assert ended(int(log.read_text().split()[1]))


def test_an_answer_before_the_draft_process_is_ready(start):
    with pytest.raises(RuntimeError, match="Lost out of turn"):
        start("hasty")


def test_a_program_that_is_not_there(tmp_path):
    with pytest.raises(RuntimeError, match="could not be started"):
        ProcessChannel([str(tmp_path / "nothing")], {}, tmp_path / "draft.log")


def test_the_environment_is_the_parent_s_but_for_what_is_given(start, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("OF_THE_PARENT", "yes")
    start("echo")
    found = draft_process().environ()
    assert found["OF_THE_PARENT"] == "yes" and found["PYTHONPATH"] == str(ROOT)
    assert found["OMP_NUM_THREADS"] == "3"


def test_nobody_but_a_worker_starts_it(monkeypatch):
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=SOCKET_VARIABLE):
        ParentConnection()


# The end


def test_closing_ends_it_in_order(start, tmp_path, monkeypatch):
    monkeypatch.setattr(channels, "STOP_SECONDS", SECONDS)
    channel = start("echo")
    process = draft_process()
    assert os.getsid(process.pid) == process.pid
    channel.post([opened("s")])
    channel.close()
    assert ended(process.pid) and (tmp_path / "draft.log").read_text().endswith("the parent hung up\n")
    channel.close()
    channel.post([opened("t")])
    assert channel.collect(1.0) == [] or channel.collect(1.0) == []


def test_closing_while_it_is_started_again(start, monkeypatch):
    channel = start("echo", backoff=Backoff(3600.0, 3600.0, 60.0))
    kill()
    channel.close()
    assert not draft_processes()


@pytest.mark.parametrize(
    ("way", "program", "number"),
    [
        ("return", "echo", None),
        ("spawned", "echo", None),
        ("raise", "echo", None),
        ("exit at once", "deaf", None),
        ("wait", "deaf", signal.SIGTERM),
        ("wait", "deaf", signal.SIGKILL),
        ("wait", "loading", signal.SIGKILL),
    ],
)
def test_it_ends_with_its_parent(way, program, number, tmp_path):
    """number: the signal that ends the parent."""
    log = tmp_path / "draft.log"
    command = [sys.executable, "-m", "tests.support.draft_parents", way, program, str(log)]
    parent = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    try:
        process = eventually_one(lambda: draft_processes(parent.pid))
        exit_ = os.pidfd_open(process.pid)
        if number is None:
            (tmp_path / "go").touch()
        else:
            done = log.read_text if program == "loading" else (tmp_path / "ready").exists
            eventually(done, seconds=SECONDS)
            parent.send_signal(number)
        parent.wait(SECONDS)
        assert select.select([exit_], [], [], SECONDS)[0], "it lives on"
    finally:
        parent.kill()
    if program == "echo":
        assert log.read_text() == "the parent hung up\n"


def ended(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# Metrics


def test_metrics(start):
    channel = start("echo")
    assert UP._value.get() == 1
    counted = [channels.MESSAGES, channels.BYTES]
    before = [of.labels(way)._value.get() for of in counted for way in ("sent", "received")]
    channel.post([opened("s"), committed("s", 3)])
    collect_until(channel, lambda answers: len(answers) == 2)
    after = [of.labels(way)._value.get() for of in counted for way in ("sent", "received")]
    sent, received, bytes_sent, bytes_received = np.subtract(after, before)
    assert (sent, received) == (2, 2) and min(bytes_sent, bytes_received) > 30
    channel.close()
    assert UP._value.get() == 0


def test_the_server_shows_the_metrics_of_all_its_processes(tmp_path):
    """As SGLang collects them: several processes, and only one of them has a draft process."""
    program = (
        "import sys; from pathlib import Path\n"
        "from sglang_patches.drafting.channel import ProcessChannel\n"
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        f"command = [sys.executable, '-m', '{PROGRAMS}', 'echo']\n"
        "channel = ProcessChannel(command, {}, Path(sys.argv[1]))\n"
        "registry = CollectorRegistry(); multiprocess.MultiProcessCollector(registry)\n"
        "print(generate_latest(registry).decode())\n"
    )
    (tmp_path / "metrics").mkdir()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics"),
    }
    subprocess.run(
        [sys.executable, "-c", "import sglang_patches.drafting.channel"], env=environment, check=True
    )
    command = [sys.executable, "-c", program, str(tmp_path / "draft.log")]
    shown = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert "specstore_draft_up 1.0" in shown and "specstore_draft_restarts_total 0.0" in shown
    assert 'specstore_draft_messages_total{direction="received"} 1.0' in shown
