"""Priors that requests name: the table that says which there are and who may name them, and what a session then reads."""

import numpy as np
import pytest

from datastore_service.client.remote import GrpcDatastore
from datastore_service.engine.engine import Engine
from datastore_service.engine.retrieval import MAX_SEGMENTS
from datastore_service.engine.segment import build_segment
from datastore_service.engine.share import Unshared
from datastore_service.engine.shared_texts import MOST_CHOICES
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import MAX_PRIORS, Budget, Entry, Namespace, Opening, Query, Status
from datastore_service.server.engine_factory import engine_factory
from datastore_service.server.prior_file import read_priors
from datastore_service.storage.manifest import Manifest, write_manifest
from datastore_service.storage.segment_file import SUFFIX, write_segment
from tests.tenant_names import PAIRS
from tests.unit.server.service import VOCAB, running

TOKENIZER = "a" * 64
PROMPT = np.arange(10, 18, dtype=np.int32)
SECONDS = 60.0


def text(continuation):
    return np.array([*PROMPT, *[continuation] * 4], np.int32)


def segments(continuation):
    return [build_segment([text(continuation)], VOCAB)]


def write_prior(directory, continuation, tokenizer=TOKENIZER):
    directory.mkdir()
    write_segment(directory / f"0{SUFFIX}", segments(continuation)[0], tokenizer)
    write_manifest(directory, Manifest(tokenizer, VOCAB, (f"0{SUFFIX}",)))
    return directory


def asks(session, *priors, tenant="", **entry):
    opening = Opening(prompt_length=len(PROMPT), priors=priors, publish=False)
    return Entry(session, 0, PROMPT, budget=Budget(8, 1), opening=opening, tenant=tenant, **entry)


def first_tokens(replies):
    """What each tree proposes next."""
    assert all(reply.status is Status.OK for reply in replies)
    return [set(reply.tree.tokens.tolist()) for reply in replies]


def test_a_session_reads_the_priors_that_it_names():
    engine = Engine(VOCAB, segments(1), named_priors={"b": segments(2), "c": segments(3)})
    asked = [asks("1"), asks("2", "b"), asks("3", "c", "b"), asks("4", "b", "c", "b"), asks("5", "d")]
    assert first_tokens(engine.step(asked)) == [{1}, {1, 2}, {1, 2, 3}, {1, 2, 3}, {1}]
    assert engine.stats().unknown_priors == 1 and engine.stats().tiers[Tier.PRIOR].segments == 3
    again = [Entry(entry.session, len(PROMPT), budget=Budget(8, 1)) for entry in reversed(asked)]
    assert first_tokens(engine.step(again)) == [{1}, {1, 2, 3}, {1, 2, 3}, {1, 2}, {1}]


def test_each_query_is_answered_from_its_session_s_priors():
    """Their tokens stand in one array, one session's after the other's."""
    engine = Engine(VOCAB, named_priors={"b": segments(2), "c": segments(3)})
    queries = tuple(Query(np.array([token], np.int32), Budget(1, 1)) for token in (2, 3))
    replies = engine.step([asks(str(row), name, queries=queries) for row, name in enumerate("bcb")])
    found = [[tree.tokens.tolist() for tree in reply.trees] for reply in replies]
    assert found == [[[2], []], [[], [3]], [[2], []]]


def test_texts_that_change_are_read_anew():
    engine = Engine(VOCAB, named_priors={"b": segments(2)})
    engine.step([asks("1", "b")])
    engine.warmup([text(5)])
    entry = Entry("1", len(PROMPT), budget=Budget(8, 1))
    assert first_tokens(engine.step([entry])) == [{2, 5}]
    engine.take_out({*engine.segments()[:1]})
    assert first_tokens(engine.step([entry])) == [{5}]
    assert engine.stats().tiers[Tier.PRIOR].damaged == 1
    engine.set_prior(())
    engine.flush()
    assert engine.segments() == ()


def test_choices_that_nobody_makes_again_are_not_kept():
    names = [str(number) for number in range(7)]
    engine = Engine(VOCAB, named_priors={name: segments(int(name)) for name in names})
    choices = [[name for bit, name in enumerate(names) if number >> bit & 1] for number in range(1, 128)]
    for number, choice in enumerate(choices):
        replies = engine.step([asks(str(number), *choice, closing=True)])
        assert first_tokens(replies) == [{*map(int, choice)}]
    assert len(engine._texts._chosen) <= MOST_CHOICES < len(choices)


def test_all_priors_of_an_engine_together_have_a_limit():
    """A session may name all of them."""
    with pytest.raises(ValueError, match=f"segments: {MAX_SEGMENTS + 1} exceed the limit of {MAX_SEGMENTS}"):
        Engine(VOCAB, segments(1), named_priors={"b": segments(2) * MAX_SEGMENTS})


def test_more_names_than_a_session_may_give_are_refused_by_name():
    names = [str(number) for number in range(MAX_PRIORS + 1)]
    (reply,) = Engine(VOCAB).step([asks("1", *names)])
    assert reply.refusal == "opening.priors: 9 names exceed 8" and reply.status is Status.OVER_BUDGET


@pytest.fixture
def table(tmp_path):
    """Writes a table of priors, and reads it."""

    def read(given):
        file = tmp_path / "priors.toml"
        file.write_text(given)
        return read_priors(file)

    return read


def row(name, directory, *tenants):
    escaped = ", ".join(f'"{quoted(tenant)}"' for tenant in tenants)
    return f'[priors."{quoted(name)}"]\ndirectory = "{directory}"\ntenants = [{escaped}]\n'


def quoted(name):
    return "".join(f"\\U{ord(character):08x}" for character in name)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_named_prior_is_read_by_the_tenants_that_may_alone(table, tmp_path, pair):
    """The service decides; over the wire, in one message."""
    listener, reader = PAIRS[pair]
    named = table(row("code", write_prior(tmp_path / "code=1", 7), reader))
    with running(named=named) as service:
        datastore = GrpcDatastore(service.endpoint, Namespace("m", TOKENIZER), tenants=True)
        assert datastore.wait_connected(SECONDS)
        asked = [
            asks("1", "code", tenant=listener),
            asks("2", "code", tenant=reader),
            asks("3", tenant=reader),
        ]
        assert first_tokens(datastore.step(asked, SECONDS)) == [set(), {7}, set()]
        datastore.close()


@pytest.mark.parametrize(
    "pair", [pair for pair, names in PAIRS.items() if all(map(str.isprintable, names)) and all(names)]
)
def test_names_of_priors_that_look_alike_are_two(table, tmp_path, pair):
    one, other = PAIRS[pair]
    rows = row(one, write_prior(tmp_path / "one", 7), "*") + row(other, write_prior(tmp_path / "two", 8), "*")
    engine, _ = engine_factory(None, VOCAB, named=table(rows))(Namespace("m", TOKENIZER), None, Unshared())
    assert first_tokens(engine.step([asks("1", one), asks("2", other)])) == [{7}, {8}]


def test_a_prior_of_another_tokenizer_is_not_used(table, tmp_path):
    named = table(row("code", write_prior(tmp_path / "code", 7, "b" * 64), "*"))
    engine, has_prior = engine_factory(None, VOCAB, named=named)(Namespace("m", TOKENIZER), None, Unshared())
    assert first_tokens(engine.step([asks("1", "code")])) == [set()] and not has_prior


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("priors = 1", "priors: 1 is not a table"),
        ("[prior.a]", "prior: unknown, did you mean priors?"),
        ("[priors]\na = 1", "priors.a: 1 is not a table"),
        ('[priors.a]\ntenants = ["*"]', "priors.a.directory: None is not a text"),
        ('[priors.a]\ndirectory = "d"', "priors.a.tenants: nobody may name it"),
        ('[priors.a]\ndirectory = "d"\ntenants = "x"', "priors.a.tenants: 'x' is not a list of texts"),
        ('[priors.a]\ndirectory = "d"\ntenant = ["x"]', "priors.a.tenant: unknown, did you mean tenants?"),
        ('[priors.""]', "priors.: a name has 1 to 256 printable bytes"),
        ('[priors."a\\n"]', "a name has 1 to 256 printable bytes"),
        ("[", "Invalid"),
    ],
)
def test_a_table_that_cannot_be_is_refused_by_key(table, given, message):
    with pytest.raises(ValueError, match="priors.toml: ") as refused:
        table(given)
    assert message in str(refused.value)


def test_its_directories_are_beside_it(table, tmp_path):
    assert table(row("a", "sub/a", "*"))["a"].directory == tmp_path / "sub" / "a"
