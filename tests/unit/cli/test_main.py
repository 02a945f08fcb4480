"""Arguments and exit codes of the command, in this process."""

import pytest
from typer.testing import CliRunner

from datastore_service.cli.main import app


def run(*words: str):
    return CliRunner().invoke(app, list(words))


def test_version():
    assert run("version").output.strip()[0].isdigit()


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["fingerprint", "/none"], 1, "specstore: /none: file: No such file or directory\n"),
        (["serve", "--listen", "x"], 2, "specstore: listen: 'x' is not HOST:PORT or unix:PATH\n"),
        (["stats", "--endpoint", "x"], 2, "specstore: endpoint: 'x' is not HOST:PORT or unix:PATH\n"),
        (["query", "1", "--ids", "--tokenizer", "0" * 64], 2, "specstore: query: one of --prior and --endpoint is required\n"),
        (["flush", "--model", "m", "--tokenizer", "0" * 64], 2, "specstore: flush: one of --tier, --session and --all is required\n"),
    ],
)  # fmt: skip
def test_errors_are_one_line(words, status, message):
    result = run(*words)
    assert (result.exit_code, result.stderr) == (status, message)


def test_empty_token_file(tmp_path):
    file = tmp_path / "token"
    file.write_text("\n")
    result = run("serve", "--listen", "127.0.0.1:0", "--admin-token-file", str(file))
    assert (result.exit_code, result.stderr) == (2, f"specstore: admin-token-file: {file} is empty\n")


def test_every_command_has_help():
    for command in (
        "build",
        "serve",
        "stats",
        "flush",
        "warmup",
        "compact",
        "drop-namespace",
        "snapshot",
        "snapshots",
        "restore",
        "health",
        "fingerprint",
        "query",
        "version",
    ):
        assert run(command, "--help").exit_code == 0
