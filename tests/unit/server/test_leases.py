import threading

from datastore_service.server.leases import Leases


class Opened(set):
    """The open sessions. `open_of` as an engine answers it."""

    def open_of(self, sessions: set[str]) -> set[str]:
        return sessions & self


OPEN = Opened("abc").open_of


def test_sessions_expire_after_the_grace_of_their_broken_stream():
    leases = Leases(grace=60)
    leases.name(1, {"a", "b"}, OPEN)
    leases.name(2, {"c"}, OPEN)
    leases.stream_broke(1, now=100)
    assert leases.take_expired(159) == []
    assert leases.take_expired(160) == ["a", "b"]
    assert leases.take_expired(1000) == []


def test_a_session_taken_up_by_another_stream_stays():
    leases = Leases(grace=60)
    leases.name(1, {"a", "b"}, OPEN)
    leases.stream_broke(1, now=0)
    leases.name(2, {"a"}, OPEN)
    assert leases.take_expired(61) == ["b"]
    leases.stream_broke(2, now=100)
    assert leases.take_expired(200) == ["a"]


def test_a_session_of_two_streams_lasts_as_long_as_either():
    """The first to name it goes first, or the last; a stream that names it often holds it once."""
    for first, second in ((1, 2), (2, 1)):
        leases = Leases(grace=60)
        for stream in (1, 2, 1, 1):
            leases.name(stream, {"a"}, OPEN)
        leases.stream_broke(first, now=0)
        assert leases.take_expired(1000) == []
        leases.stream_broke(second, now=1000)
        assert leases.take_expired(1059) == []
        assert leases.take_expired(1060) == ["a"]
        assert leases.take_expired(5000) == []


def test_streams_that_break_together_end_their_session_once():
    leases = Leases(grace=60)
    leases.name(1, {"a"}, OPEN)
    leases.name(2, {"a"}, OPEN)
    leases.stream_broke(1, now=0)
    leases.stream_broke(2, now=1)
    assert leases.take_expired(60) == []
    assert leases.take_expired(61) == ["a"]


def test_a_closed_session_is_held_by_nobody():
    opened = Opened("a")
    leases = Leases(grace=0)
    leases.name(1, {"a"}, opened.open_of)
    leases.name(2, {"a"}, opened.open_of)
    opened.clear()
    leases.name(1, {"a"}, opened.open_of)
    leases.stream_broke(1, now=0)
    leases.stream_broke(2, now=0)
    assert leases.take_expired(1) == []


def test_a_session_that_is_closed_while_another_stream_names_it_is_held_by_nobody():
    """Stream 1 finds it open; before it holds it, stream 2 has closed it."""
    opened, leases = Opened("a"), Leases(grace=0)

    def closed_meanwhile(sessions: set[str]) -> set[str]:
        found = opened.open_of(sessions)
        opened.clear()
        closing.start()
        closing.join(0.2)  # waits for the lock, if all is well
        return found

    closing = threading.Thread(target=leases.name, args=(2, {"a"}, opened.open_of))
    leases.name(1, {"a"}, closed_meanwhile)
    closing.join()
    opened.add("a")  # another request of that name
    leases.name(3, {"a"}, opened.open_of)
    leases.stream_broke(3, now=0)
    assert leases.take_expired(1) == ["a"]


def test_a_flushed_session_is_not_closed_again():
    leases = Leases(grace=0)
    leases.name(1, {"a"}, OPEN)
    leases.release("a")
    leases.release("never held")
    leases.stream_broke(1, now=0)
    assert leases.take_expired(1) == []


def test_a_session_that_is_handed_over_expires_unless_another_stream_takes_it_up():
    opened = Opened("abc")
    leases = Leases(grace=60)
    leases.name(1, {"a", "b", "c"}, opened.open_of, {"a", "b", "c"}, now=0)
    leases.name(2, {"a"}, opened.open_of)
    leases.release("b")
    assert leases.take_expired(59) == []
    assert leases.take_expired(60) == ["c"]
    assert leases.take_expired(1000) == []


def test_a_session_that_is_handed_over_late_stays_with_whom_has_taken_it_up():
    leases = Leases(grace=60)
    leases.name(2, {"a"}, OPEN)
    leases.name(1, {"a"}, OPEN, {"a"}, now=0)
    assert leases.take_expired(100) == []
    leases.stream_broke(2, now=100)
    assert leases.take_expired(160) == ["a"]


def test_a_session_that_is_handed_over_can_be_held_by_two():
    leases = Leases(grace=60)
    leases.name(1, {"a"}, OPEN, {"a"}, now=0)
    leases.name(2, {"a"}, OPEN)
    leases.name(3, {"a"}, OPEN)
    leases.stream_broke(2, now=0)
    assert leases.take_expired(100) == []
    leases.stream_broke(3, now=100)
    assert leases.take_expired(160) == ["a"]
