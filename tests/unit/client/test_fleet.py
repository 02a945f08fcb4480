"""Several services behind one client: who has which session, and what happens when one goes or comes back."""

import numpy as np
import pytest
from prometheus_client import REGISTRY

from datastore_service.client.affinity import ranked
from datastore_service.client.breaker import CircuitBreaker
from datastore_service.client.link import Link
from datastore_service.client.postbox import Postbox
from datastore_service.protocol.types import Budget, Entry, Opening, Status
from tests.unit.client.test_resilient import REMOTE_TREE, TEXT, Primary, over

NAMES = ("a:1", "b:1", "c:1")
SESSIONS = [f"s{i}" for i in range(60)]


@pytest.fixture
def services():
    return {name: Primary() for name in NAMES}


@pytest.fixture
def datastore(services):
    links = [
        Link(name, service, CircuitBreaker(failures=1, first_delay=0.01))
        for name, service in services.items()
    ]
    return over(links)


def opened(name: str, conversation: str = "", group: str = "") -> Entry:
    return Entry(name, tokens=TEXT, opening=Opening(conversation, True, len(TEXT), group=group))


def placed(services) -> dict[str, str]:
    """Which service was last sent each session."""
    return {entry.session: name for name, service in services.items() for entry in service.posted}


def ask(datastore, names=SESSIONS):
    return datastore.step([Entry(name, 40, budget=Budget(4)) for name in names], 0.05)


def test_sessions_spread_over_the_services_and_stay(datastore, services):
    datastore.post([opened(name) for name in SESSIONS])
    where = placed(services)
    assert {len([s for s in SESSIONS if where[s] == name]) for name in NAMES} <= set(range(8, 40))
    assert all(reply.tree is REMOTE_TREE for reply in ask(datastore))
    for name, service in services.items():
        assert {entry.session for entry in service.asked[-1]} == {s for s in SESSIONS if where[s] == name}


def test_an_instance_that_only_posts_finds_the_same_services(datastore, services):
    datastore.post([opened(name) for name in SESSIONS])
    others = {name: Primary() for name in NAMES}
    Postbox(others).post([opened(name) for name in SESSIONS])
    assert placed(others) == placed(services)


def test_the_post_goes_round_a_service_that_is_gone(services):
    services["b:1"].mode = "gone"
    Postbox(services).post([opened(name) for name in SESSIONS])
    assert len(placed(services)) == len(SESSIONS) and services["b:1"].posted == []


def test_a_conversation_stays_with_its_service(datastore, services):
    datastore.post([opened(name, "talk") for name in SESSIONS])
    assert len(set(placed(services).values())) == 1


def test_siblings_of_several_conversations_have_one_service(datastore, services):
    datastore.post([opened(name, f"talk {name}", "prompt 7") for name in SESSIONS])
    assert len(set(placed(services).values())) == 1


@pytest.mark.parametrize("mode", ["gone", "slow"])
def test_the_sessions_of_a_service_that_does_not_answer_move_whole(datastore, services, mode):
    datastore.post([opened(name) for name in SESSIONS])
    before = placed(services)
    services["b:1"].mode = mode
    for service in services.values():
        service.posted.clear()
    ask(datastore)  # a slow one's breaker opens, and no other
    replies = ask(datastore)
    assert all(reply.tree is REMOTE_TREE for reply in replies)
    moved = [entry for name in ("a:1", "c:1") for entry in services[name].posted]
    assert {entry.session for entry in moved} == {s for s in SESSIONS if before[s] == "b:1"}
    assert all(e.start == 0 and e.tokens.tolist() == TEXT.tolist() and e.opening for e in moved)
    assert all(entry.closing and entry.withheld for entry in services["b:1"].posted), "published once"
    told = {entry.session for entry in services["b:1"].posted}  # it may only be slow
    assert told == ({entry.session for entry in moved} if mode == "slow" else set())


def test_a_service_that_comes_back_gets_new_sessions_and_no_old_ones(datastore, services):
    datastore.post([opened(name) for name in SESSIONS])
    services["b:1"].mode = "gone"
    for _ in range(2):
        ask(datastore)
    services["b:1"].mode = "ok"
    for _ in range(100):
        ask(datastore)
        if datastore.links["b:1"].usable:
            break
    services["b:1"].asked.clear()
    ask(datastore)
    assert not any(services["b:1"].asked)
    datastore.post([opened(name + "x") for name in SESSIONS])
    assert "b:1" in placed(services).values()


def test_with_no_service_left_sessions_stay_and_are_drafted_here(datastore, services):
    datastore.post([opened(name) for name in SESSIONS])
    for service in services.values():
        service.mode = "gone"
    for _ in range(3):
        assert all(reply.status is Status.OK and len(reply.tree) for reply in ask(datastore))


def test_one_that_goes_takes_only_its_own_keys_with_it():
    keys = [str(i) for i in range(300)]
    for key in keys:
        assert ranked(key, ("a:1", "c:1")) == [name for name in ranked(key, NAMES) if name != "b:1"]


def takeovers(session: str) -> float:
    return REGISTRY.get_sample_value("specstore_client_takeovers_total", {"session": session}) or 0.0


@pytest.mark.parametrize(
    ("status", "counted"), [(Status.OK, "held"), (Status.GAP, "missing"), (None, "unanswered")]
)
def test_a_session_that_another_instance_began_is_counted_and_sent_if_it_is_missing(status, counted):
    service, before = Primary(), takeovers(counted)
    datastore = over([Link("a:1", service)])
    if status is None:
        service.mode = "slow"
    elif status is Status.GAP:
        service.statuses["s"] = status, 0
    text = np.append(TEXT, np.int32(7))
    entry = Entry("s", 0, text, budget=Budget(4), opening=Opening("", True, 40), expected=40)
    (reply,) = datastore.step([entry], 0.05)
    assert (reply.status, reply.known) == (Status.OK, 41)
    assert takeovers(counted) == before + 1
    sent_again = [entry.tokens.tolist() for entry in service.posted]
    assert sent_again == ([text.tolist()] if counted == "missing" else [])
