from datastore_service.server.leases import Leases


def test_sessions_expire_after_the_grace_of_their_broken_stream():
    leases = Leases(grace=60)
    leases.hold(1, ["a", "b"])
    leases.hold(2, ["c"])
    leases.stream_broke(1, now=100)
    assert leases.take_expired(159) == []
    assert sorted(leases.take_expired(160)) == ["a", "b"]
    assert leases.take_expired(1000) == []


def test_a_session_taken_up_by_another_stream_stays():
    leases = Leases(grace=60)
    leases.hold(1, ["a", "b"])
    leases.stream_broke(1, now=0)
    leases.hold(2, ["a"])
    assert leases.take_expired(61) == ["b"]
    leases.stream_broke(2, now=100)
    assert leases.take_expired(200) == ["a"]


def test_a_closed_session_is_not_closed_again():
    leases = Leases(grace=0)
    leases.hold(1, ["a"])
    leases.release("a")
    leases.release("never held")
    leases.stream_broke(1, now=0)
    assert leases.take_expired(1) == []


def test_a_session_that_is_handed_over_expires_unless_another_stream_takes_it_up():
    leases = Leases(grace=60)
    leases.hand_over(["a", "b", "c"], now=0)
    leases.hold(2, ["a"])
    leases.release("b")
    assert leases.take_expired(59) == []
    assert leases.take_expired(60) == ["c"]
    assert leases.take_expired(1000) == []


def test_a_session_that_is_handed_over_late_stays_with_whom_has_taken_it_up():
    leases = Leases(grace=60)
    leases.hold(2, ["a"])
    leases.hand_over(["a"], now=0)
    assert leases.take_expired(100) == []
    leases.stream_broke(2, now=100)
    assert leases.take_expired(160) == ["a"]
