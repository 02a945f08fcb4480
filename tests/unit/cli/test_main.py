"""Arguments and exit codes of the command, in this process."""

import inspect
import json
import logging
import re
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from datastore_service.cli.main import app, serve
from datastore_service.cli.options import ENDPOINT_VARIABLE, TOKEN_VARIABLE, admin_token
from datastore_service.engine.limits import Limits
from datastore_service.server.limits import ServiceLimits


@pytest.fixture(autouse=True)
def logging_as_before():
    """`serve` sends the log to a stream that is closed after the test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


def run(*words: str):
    return CliRunner().invoke(app, list(words))


def test_version():
    assert run("version").output.strip()[0].isdigit()
    assert run("--version").output == run("version").output


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["fingerprint", "/none"], 2, "specstore: tokenizer: /none is neither a folder with tokenizer.json nor that file\n"),
        (["serve", "--listen", "x"], 2, "specstore: listen: 'x' is not HOST:PORT or unix:PATH\n"),
        (["serve", "--listen", "127.0.0.1:0", "--tls-key", "/none"], 2, "specstore: tls-key: needs tls-certificate\n"),
        (["serve", "--encryption-keys", "/none"], 2, "specstore: encryption-keys: needs data\n"),
        (["serve", "--listen", "127.0.0.1:0", "--metrics-host", "0.0.0.0"], 2, "specstore: metrics-host: 0.0.0.0 is reachable from other machines; --allow-remote permits that\n"),
        (["serve", "--sessions", "0"], 2, "specstore: sessions: 0 is below 1\n"),
        (["serve", "--tokens", "0"], 2, "specstore: tokens: 0 is below 1\n"),
        (["serve", "--live-tokens", "-1"], 2, "specstore: live_tokens: -1 is not at least 0\n"),
        (["serve", "--refusals", "-1"], 2, "specstore: refusals: -1 is not at least 0\n"),
        (["serve", "--conversation-seconds", "nan"], 2, "specstore: conversation_seconds: nan is not at least 0\n"),
        (["stats", "--endpoint", "x"], 2, "specstore: endpoint: 'x' is not HOST:PORT or unix:PATH\n"),
        (["query", "1", "--ids", "--tokenizer", "0" * 64, "--prior", "p", "--endpoint", "x:1"], 2, "specstore: query: either --prior or --endpoint, not both\n"),
        (["flush", "--model", "m", "--tokenizer", "0" * 64], 2, "specstore: flush: one of --tier, --session, --workspace and --all is required\n"),
    ],
)  # fmt: skip
def test_errors_are_one_line(words, status, message):
    result = run(*words)
    assert (result.exit_code, result.stderr) == (status, message)


def test_bounds_default_to_the_engine_s_and_the_service_s_own():
    given = inspect.signature(serve).parameters
    limits = Limits()
    for name in ("sessions", "tokens", "live_tokens", "conversation_seconds", "refusals"):
        assert given[name].default == getattr(limits, name)
    for name in ("grace", "streams"):
        assert given[name].default == getattr(ServiceLimits(), name)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (" \n", "is empty"),
        ("t\u00f6ken", "a token has printable ASCII characters alone"),
        ("a\nb", "a token has printable"),
    ],
)
@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("serve --listen 127.0.0.1:0", "admin-token-file"),
        ("stats --endpoint 127.0.0.1:1", "token-file"),
    ],
)
def test_a_token_that_no_header_carries_is_refused_on_both_sides(
    tmp_path, monkeypatch, command, option, token, message
):
    file = tmp_path / "token"
    file.write_text(token)
    result = run(*command.split(), f"--{option}", str(file))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"specstore: {option}: {file}") and message in result.stderr
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    result = run(*command.split())
    assert result.exit_code == 2
    assert result.stderr.startswith(f"specstore: {TOKEN_VARIABLE}") and message in result.stderr


@pytest.mark.parametrize("token", ["abc\n", "\tabc \r\n"])
def test_a_secret_that_ends_with_a_line_feed_is_its_token(tmp_path, monkeypatch, token):
    file = tmp_path / "token"
    file.write_text(token)
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    assert admin_token(file) == admin_token(None) == "abc"
    monkeypatch.setenv(TOKEN_VARIABLE, "")
    assert admin_token(None) == ""


def test_serve_makes_its_data_directory(tmp_path, monkeypatch):
    """The first command of a page on services, in a new folder; a file in its place is refused."""
    monkeypatch.setattr("datastore_service.server.service.serve", lambda service, *_: service.stop())
    folder = tmp_path / "new" / "data"
    serving = ("serve", "--listen", "127.0.0.1:0", "--data")
    assert run(*serving, str(folder)).exit_code == 0 and folder.is_dir()
    other = tmp_path / "other"
    result = run(*serving, str(other), "--prior", str(tmp_path / "none"))
    assert "none/manifest.json" in result.stderr and str(other) not in result.stderr
    file = tmp_path / "file"
    file.touch()
    result = run("serve", "--listen", "127.0.0.1:0", "--data", str(file))
    assert (result.exit_code, result.stderr) == (2, f"specstore: data: {file} is not a directory\n")


ROOT = Path(__file__).parents[3]
COMMANDS = get_command(app).commands


def test_inside_the_image_every_verb_asks_the_service_that_runs_there():
    dockerfile = (ROOT / "docker" / "datastore.Dockerfile").read_text()
    listens = json.loads(re.search(r"^CMD (.*)", dockerfile, re.MULTILINE)[1])
    (variable,) = re.findall(rf"{ENDPOINT_VARIABLE}=(\S+)", dockerfile)
    assert listens[listens.index("--listen") + 1] == variable


@pytest.mark.parametrize("command", COMMANDS)
def test_the_endpoint_may_be_a_variable(command):
    endpoint = next((option for option in COMMANDS[command].params if option.name == "endpoint"), None)
    if endpoint is not None:
        assert endpoint.envvar == ENDPOINT_VARIABLE and not endpoint.required
        words = [command, "1", "--ids"] if command == "query" else [command]
        needed = [["--model", "m"], ["--tokenizer", "0" * 64]]
        live = command == "collect"  # its --live asks a service
        named = [word for option in needed if live or option[0] in required(command) for word in option]
        words += ["prompts", "--out", "answers", "--live"] * live
        words += ["--subject", "user:ada"] * (command == "forget")
        words += ["--all"] * (command == "flush") + ["--server-file", "f"] * (command == "warmup")
        words += ["name"] * (command in ("snapshot", "restore"))
        result = CliRunner().invoke(app, words + named, env={ENDPOINT_VARIABLE: "nowhere"})
        assert result.stderr == "specstore: endpoint: 'nowhere' is not HOST:PORT or unix:PATH\n"


def required(command: str) -> set[str]:
    return {p.opts[0] for p in COMMANDS[command].params if p.required and p.opts[0].startswith("--")}


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_cuts_no_name_at_80_columns(monkeypatch, command):
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    shown = run(*filter(None, [command]), "--help").stdout
    names = [name for p in COMMANDS[command].params for name in names_of(p)] if command else list(COMMANDS)
    assert [name for name in names if not re.search(rf" {name}(\.\.\.)? ", shown)] == []
    assert "\u2026" not in shown and max(map(len, shown.splitlines())) <= 80


def names_of(parameter) -> list[str]:
    """What help calls it."""
    named = parameter.param_type_name == "argument" and parameter.metavar
    return [parameter.metavar] if named else parameter.opts


def test_help_lists_the_verbs_in_the_order_of_their_use():
    shown = run("--help").stdout
    assert run().stdout.split("Options")[1] == shown.split("Options")[1]
    listed = re.findall(r"^\u2502 ([a-z]+) ", shown, re.MULTILINE)
    order = [
        listed.index(verb) for verb in ("serve", "build", "collect", "query", "stats", "flush", "version")
    ]
    assert order == sorted(order)
