"""Arguments and exit codes of the command, in this process."""

import inspect
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from datastore_service.cli.main import app, serve
from datastore_service.engine.engine import Limits


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


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["fingerprint", "/none"], 1, "specstore: /none: file: No such file or directory\n"),
        (["serve", "--listen", "x"], 2, "specstore: listen: 'x' is not HOST:PORT or unix:PATH\n"),
        (["serve", "--listen", "127.0.0.1:0", "--tls-key", "/none"], 2, "specstore: tls-key: needs tls-certificate\n"),
        (["serve", "--sessions", "0"], 2, "specstore: sessions: 0 is below 1\n"),
        (["serve", "--tokens", "0"], 2, "specstore: tokens: 0 is below 1\n"),
        (["serve", "--live-tokens", "-1"], 2, "specstore: live_tokens: -1 is not at least 0\n"),
        (["serve", "--refusals", "-1"], 2, "specstore: refusals: -1 is not at least 0\n"),
        (["serve", "--conversation-seconds", "nan"], 2, "specstore: conversation_seconds: nan is not at least 0\n"),
        (["stats", "--endpoint", "x"], 2, "specstore: endpoint: 'x' is not HOST:PORT or unix:PATH\n"),
        (["query", "1", "--ids", "--tokenizer", "0" * 64], 2, "specstore: query: one of --prior and --endpoint is required\n"),
        (["flush", "--model", "m", "--tokenizer", "0" * 64], 2, "specstore: flush: one of --tier, --session and --all is required\n"),
    ],
)  # fmt: skip
def test_errors_are_one_line(words, status, message):
    result = run(*words)
    assert (result.exit_code, result.stderr) == (status, message)


def test_bounds_default_to_the_engine_s_own():
    given = inspect.signature(serve).parameters
    limits = Limits()
    for name in ("sessions", "tokens", "live_tokens", "conversation_seconds", "refusals"):
        assert given[name].default == getattr(limits, name)


def test_empty_token_file(tmp_path):
    file = tmp_path / "token"
    file.write_text("\n")
    result = run("serve", "--listen", "127.0.0.1:0", "--admin-token-file", str(file))
    assert (result.exit_code, result.stderr) == (2, f"specstore: admin-token-file: {file} is empty\n")


COMMANDS = [
    command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_is_documented(command):
    assert run(command, "--help").exit_code == 0
    operations = Path(__file__).parents[3] / "docs" / "operations.md"
    assert f"`{command}`" in operations.read_text()
