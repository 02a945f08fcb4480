"""`specstore collect` in this process. The model's server is a stand-in on the loopback."""

import json
import signal
import subprocess
import sys
import threading

import pytest
from typer.testing import CliRunner

from datastore_service.answers import chat_server
from datastore_service.cli.main import app
from datastore_service.storage.errors import StorageError
from datastore_service.storage.manifest import open_segments, write_manifest
from tests.unit.answers.stand_in import answered, standing_in
from tests.unit.cli.test_bad_input import assert_one_line
from tests.unit.server.service import running
from tests.unit.storage.conftest import WORDS, write_tokenizer

PROMPTS = ["one", "two", "three"]
SPECSTORE = [sys.executable, "-m", "datastore_service.cli.main"]
SECONDS = 60.0


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(chat_server, "RETRY_SECONDS", (0.0,))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return path


@pytest.fixture
def out(tmp_path):
    return tmp_path / "answers.jsonl"


@pytest.fixture
def tokenizer(tmp_path):
    return write_tokenizer(tmp_path / "tokenizer", WORDS)


def reply(body):
    """The words a b c, whose ids are 1 2 3 with the tokenizer: the told ids are others."""
    return answered("a b c", [4, 5, 6, 7])


@pytest.fixture
def server():
    with standing_in(reply) as server:
        yield server


@pytest.fixture
def collect(prompts, out, server):
    def run(*words: object, prompts=prompts):
        begin = ["collect", prompts, "--server", server.url, "--out", out]
        return CliRunner().invoke(app, [*map(str, begin), *map(str, words)])

    return run


def rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def documents(prior) -> list[list[int]]:
    segments = open_segments(prior)
    return [segment.document(i).tolist() for segment in segments for i in range(segment.documents)]


def test_each_prompt_gets_a_line(collect, out, server):
    done = collect()
    assert (done.exit_code, done.stdout) == (0, f"{out}: 3 answers, 12 tokens\n"), done.stderr
    got = sorted(rows(out), key=lambda row: PROMPTS.index(row["prompt"]))
    assert got == [{"prompt": p, "round": 1, "answer": "a b c", "tokens": [4, 5, 6, 7]} for p in PROMPTS]
    assert {body["temperature"] for body in server.requests} == {0.0}


def test_further_rounds_are_sampled_and_a_finished_round_is_not_asked_again(collect, out, server):
    assert collect().exit_code == 0
    done = collect("--rounds", 3, "--temperature", 0.5, "--max-tokens", 9, "--json")
    assert json.loads(done.stdout) == {"answers": 9, "tokens": 36}
    assert sorted(row["round"] for row in rows(out)) == [1] * 3 + [2] * 3 + [3] * 3
    assert [(body["temperature"], body["max_tokens"]) for body in server.requests[3:]] == [(0.5, 9)] * 6


def test_a_finished_run_asks_nothing(collect, out, server):
    assert collect().exit_code == 0
    asked = len(server.requests)
    server.models = 500
    assert collect().stdout == f"{out}: 3 answers, 12 tokens\n"
    assert len(server.requests) == asked


def test_a_file_of_other_prompts_is_refused(collect, out, tmp_path, server):
    assert collect().exit_code == 0
    before, other = out.read_bytes(), tmp_path / "other.jsonl"
    other.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    assert_one_line(collect(prompts=other), f"{out}: prompt: holds answers to other prompts: 'three'")
    assert_one_line(collect("--out", other), f"{other}: line 1: no answer")
    assert out.read_bytes() == before and len(server.requests) == 3


def test_a_failure_says_how_far_it_came_and_the_next_run_goes_on(collect, out, server):
    server.reply = lambda body: (503, {}) if body["messages"][0]["content"] == "two" else reply(body)
    done = collect("--concurrency", 1)
    assert_one_line(
        done, f"server: {server.url}: no answer in 2 tries: 503: ", f"; 1 of 3 answers are in {out}\n"
    )
    assert [row["prompt"] for row in rows(out)] == ["one"]
    server.reply = reply
    assert collect().exit_code == 0
    assert server.prompts[:3] == ["one", "two", "two"]
    assert sorted(server.prompts[3:]) == ["three", "two"]  # asked side by side


@pytest.fixture
def interruptible():
    """Python leaves the signal ignored if its parent ignores it, as a shell's background job does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_keeps_its_answers_and_the_next_goes_on(collect, prompts, out, server):
    asked, over = threading.Event(), threading.Event()

    def waiting(body):
        if body["messages"][0]["content"] == "two":
            asked.set()
            over.wait(SECONDS)  # the answer would be there before a busy machine notices the signal
        return reply(body)

    with out.open("w") as file:
        file.write('{"prompt": "th')  # of a run that was killed while it wrote
    server.reply = waiting
    words = ["collect", prompts, "--server", server.url, "--out", out, "--concurrency", 1]
    with subprocess.Popen([*SPECSTORE, *map(str, words)], stderr=subprocess.PIPE, text=True) as command:
        assert asked.wait(SECONDS)
        command.send_signal(signal.SIGINT)
        _, said = command.communicate(timeout=SECONDS)
    over.set()
    assert command.returncode == 130
    assert said == f"specstore: interrupted; 1 of 3 answers are in {out}; the same command goes on\n"
    server.reply = reply
    assert collect().stdout == f"{out}: 3 answers, 12 tokens\n"


def test_a_prompt_that_the_server_refuses(collect, out, prompts, server):
    server.reply = lambda body: (400, {"message": "too long"})
    done = collect("--concurrency", 1)
    assert_one_line(
        done, f"{prompts}: document 1: refused by {server.url}: 400: too long; 0 of 3 answers are in"
    )


def test_a_server_that_is_not_there(collect, server, free_port):
    done = collect("--server", f"http://127.0.0.1:{free_port}")
    assert_one_line(done, f"server: http://127.0.0.1:{free_port}: cannot be reached: ", "0 of 3 answers")


def test_a_server_that_wants_a_key(collect, tmp_path, server, monkeypatch):
    monkeypatch.setenv("SPECSTORE_SERVER_KEY", "one")
    assert collect("--rounds", 1).exit_code == 0
    assert server.headers["Authorization"] == "Bearer one"
    (tmp_path / "key").write_text("two\n")
    assert collect("--rounds", 2, "--server-key-file", tmp_path / "key").exit_code == 0
    assert server.headers["Authorization"] == "Bearer two"


def test_the_prior_holds_the_exact_tokens(collect, tmp_path, tokenizer):
    prior = tmp_path / "prior"
    done = collect("--prior", prior, "--tokenizer", tokenizer)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith(f"{prior}: 12 tokens in 1 segments, tokenizer ")
    assert documents(prior) == [[4, 5, 6, 7]] * 3


def test_without_exact_tokens_the_text_is_encoded(collect, out, tmp_path, tokenizer, server):
    server.reply = lambda body: answered("a b c")
    prior = tmp_path / "prior"
    done = collect("--prior", prior, "--tokenizer", tokenizer)
    assert done.stdout.startswith(f"{out}: 3 answers, not all with token ids\n{prior}: 9 tokens in 1 ")
    assert documents(prior) == [[1, 2, 3]] * 3
    done = collect("--json")
    assert json.loads(done.stdout) == {"answers": 3, "tokens": None}


def test_a_prior_that_is_there_is_refused_before_anything_is_asked(collect, tmp_path, tokenizer, server):
    into = ("--prior", tmp_path / "prior", "--tokenizer", tokenizer)
    assert collect(*into).exit_code == 0
    message = f"{tmp_path / 'prior'}: prior: is here already; `specstore build` adds to it"
    assert_one_line(collect(*into), message)
    assert_one_line(collect(*into, "--rounds", 2), message)
    assert len(server.requests) == 3


def test_a_prior_whose_build_was_interrupted_is_finished(collect, tmp_path, tokenizer, monkeypatch):
    def last_write_fails(directory, manifest):
        if not manifest.source:
            raise StorageError(directory, "disk", "full")
        write_manifest(directory, manifest)

    prior = tmp_path / "prior"
    with monkeypatch.context() as patched:
        patched.setattr("datastore_service.storage.build.write_manifest", last_write_fails)
        assert_one_line(collect("--prior", prior, "--tokenizer", tokenizer), "disk: full")
    assert_one_line(
        collect("--prior", prior, "--tokenizer", tokenizer, "--rounds", 2), "prior: is here already"
    )
    assert collect("--prior", prior, "--tokenizer", tokenizer).exit_code == 0
    assert documents(prior) == [[4, 5, 6, 7]] * 3


def test_live_text_is_added_to_a_service(collect, tokenizer):
    with running() as service:
        into = ("--live", "--endpoint", service.endpoint, "--model", "m", "--tokenizer", tokenizer)
        done = collect(*into, "--json")
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout)["live"] == {"documents": 3, "tokens": 12}
        done = collect(*into)
        assert done.stdout.splitlines()[1] == "added 3 documents, 12 tokens"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prior", "p"], "tokenizer: --prior and --live need it"),
        (["--live", "--model", "m"], "tokenizer: --prior and --live need it"),
        (["--live", "--tokenizer", "0" * 64], "model: --live needs it"),
        (["--model", "m"], "model: is for --live"),
        (["--endpoint", "127.0.0.1:1"], "endpoint: is for --live"),
        (
            ["--live", "--model", "m", "--tokenizer", "0" * 64, "--endpoint", "x"],
            "endpoint: 'x' is not HOST:PORT",
        ),
        (["--temperature", "0"], "temperature: 0.0 is not above 0"),
        (["--temperature", "nan"], "temperature: nan is not above 0"),
        (["--server", "nowhere"], "server: 'nowhere' is not http://HOST:PORT"),
    ],
)
def test_options_that_do_not_fit(collect, server, words, message):
    assert_one_line(collect(*words), message, status=2)
    assert not server.requests


def test_files_that_cannot_be_used(collect, tmp_path, server):
    assert_one_line(collect(prompts=tmp_path / "none"), "none: file: No such file")
    assert_one_line(collect("--out", tmp_path / "no" / "where"), f"{tmp_path / 'no' / 'where'}: No such file")
    assert_one_line(
        collect("--prior", tmp_path / "p", "--tokenizer", tmp_path),
        f"tokenizer: {tmp_path} is neither a folder with tokenizer.json nor",
        status=2,
    )
    assert_one_line(collect("--server-key-file", tmp_path / "none"), "none: No such file")
    assert_one_line(collect("--field", "text"), "line 1: no JSON object with a field 'text'")
    assert not server.requests


def test_a_disk_that_is_full_ends_the_run_and_the_next_goes_on(collect, out, server):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        done = collect("--concurrency", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert_one_line(done, "File too large")
    assert collect().stdout == f"{out}: 3 answers, 12 tokens\n"
