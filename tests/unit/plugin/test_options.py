import argparse

import pytest

from datastore_service.client import Access
from sglang_patches.options import Options, add_flags, check_options, export_flags, load_options


def _parse(*argv):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(argv)


def test_flag_beats_environment_beats_file_beats_default(tmp_path, monkeypatch):
    file = tmp_path / "specstore.toml"
    file.write_text('endpoint = "file:1"\ndeadline_ms = 7\nnodes = 5\n')
    monkeypatch.setenv("SPECSTORE_CONFIG", str(file))
    monkeypatch.setenv("SPECSTORE_ENDPOINT", "environment:1")
    monkeypatch.setenv("SPECSTORE_DEADLINE_MS", "8")
    export_flags(_parse("--specstore-endpoint", "flag:1"))
    options = load_options()
    assert (options.endpoint, options.deadline_ms, options.nodes, options.tenant) == ("flag:1", 8.0, 5, "")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"SPECSTORE_NODES": "0"}, "nodes: 0 is outside 1..63"),
        ({"SPECSTORE_NODES": "many"}, "nodes: 'many' is not a valid int"),
        ({"SPECSTORE_DEADLINE_MS": "nan"}, "deadline_ms"),
        ({"SPECSTORE_LENGTH": "long"}, "length: 'long' is not one of"),
        ({"SPECSTORE_PRIOR": "d", "SPECSTORE_ENDPOINT": "host:1"}, "prior: only with endpoint 'embedded'"),
        ({"SPECSTORE_DRAFT_DEVICE": "gpu"}, "draft_device: 'gpu' is not cpu, cuda or cuda:N"),
        ({"SPECSTORE_DRAFT_TOKENS": "0"}, "draft_tokens: 0 is below 1"),
        ({"SPECSTORE_DRAFT_ROWS": "257"}, "draft_rows: 257 is outside 1..256"),
        ({"SPECSTORE_DRAFT_LOOKAHEAD": "0"}, "draft_lookahead: 0 is outside 1..63"),
        ({"SPECSTORE_FALLBACK": "guess"}, "fallback: 'guess' is not one of"),
        ({"SPECSTORE_ENDPOINT": "host"}, "option endpoint: 'host' is not HOST:PORT or unix:PATH"),
        ({"SPECSTORE_ENDPOINT": "host:1,embeded"}, "option endpoint: 'embeded' is not HOST:PORT"),
        ({"SPECSTORE_ENDPOINT": "host:99999"}, "option endpoint: port 99999 exceeds 65535"),
        ({"SPECSTORE_TLS_CA": "f"}, "tls_ca: endpoint 'embedded' has no connection"),
        ({"SPECSTORE_TOKEN_FILE": "f"}, "token_file: endpoint 'embedded' has no connection"),
    ],
)
def test_bad_values_name_the_field(values, message):
    with pytest.raises(ValueError, match=message):
        load_options(values)


def test_unknown_key_in_the_file_is_named(tmp_path):
    file = tmp_path / "specstore.toml"
    file.write_text("endpiont = 'x'\n")
    with pytest.raises(ValueError, match="unknown specstore option endpiont, did you mean endpoint\\? \\("):
        load_options({"SPECSTORE_CONFIG": str(file)})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nodes = 3.7", "nodes: 3.7 is not a valid int"),
        ("nodes = true", "nodes: True is not a valid int"),
        ("nodes = '3'", "nodes: '3' is not a valid int"),
        ("deadline_ms = true", "deadline_ms: True is not a valid float"),
        ("tenant = 5", "tenant: 5 is not a valid str"),
        ("prior = []", r"prior: \[\] is not a valid str"),
    ],
)
def test_values_of_another_type_in_the_file_are_refused(tmp_path, line, message):
    file = tmp_path / "specstore.toml"
    file.write_text(line)
    with pytest.raises(ValueError, match=f"^{file}: specstore option {message}$"):
        load_options({"SPECSTORE_CONFIG": str(file)})


def test_options_are_frozen():
    with pytest.raises(AttributeError):
        Options().nodes = 3


def test_the_token_s_file_is_read_each_time(tmp_path):
    assert load_options({"SPECSTORE_ENDPOINT": "host:1"}).access() == Access()
    file = tmp_path / "token"
    options = load_options({"SPECSTORE_ENDPOINT": "host:1", "SPECSTORE_TOKEN_FILE": str(file)})
    with pytest.raises(FileNotFoundError):
        options.access()
    for token in ("one", "two"):
        file.write_text(f"{token}\n")
        assert options.access().token == token
    file.write_text("")
    with pytest.raises(ValueError, match=f"^token-file: {file} is empty$"):
        options.access()


def test_tls_files_are_read_where_they_are_named(tmp_path):
    assert load_options({"SPECSTORE_ENDPOINT": "host:1"}).access().tls is None
    gone = {"SPECSTORE_ENDPOINT": "host:1", "SPECSTORE_TLS_CA": str(tmp_path / "gone")}
    with pytest.raises(ValueError, match=f"^tls-ca: {tmp_path}/gone: No such file or directory$"):
        load_options(gone).access()


@pytest.mark.parametrize(
    ("words", "file", "message"),
    [
        (("--specstore-nodes", "999"), "", "specstore option nodes: 999 is outside 1..63"),
        (("--specstore-endpoint", "nowhere"), "", "specstore option endpoint: 'nowhere' is not HOST:PORT"),
        (("--specstore-prior", "none"), "", "none/manifest.json: file: No such file or directory"),
        (("--specstore-config", "none.toml"), "", "No such file or directory: 'none.toml'"),
        (("--specstore-config", "FILE"), "nodes = ", "specstore.toml: Invalid value (at end of document)"),
        (("--specstore-config", "FILE"), "nodes = 3.7", "nodes: 3.7 is not a valid int"),
        (
            ("--specstore-config", "FILE"),
            "[specstore]\nnodes = 3",
            "unknown specstore option specstore (keys stand at the top",
        ),
        (
            ("--specstore-config", "FILE"),
            "request-tenant = ''",
            "did you mean request_tenant? (keys stand at the top, with underscores)",
        ),
        (("--specstore-nodes", "many"), "", "specstore option nodes: 'many' is not a valid int"),
        (("--specstore-publish", "maybe"), "", "specstore option publish: 'maybe' is not one of on, off"),
    ],
)
def test_a_bad_option_ends_the_command_line_in_one_line(plugin, tmp_path, capsys, words, file, message):
    """Through SGLang's own parser, hooked, before a model is looked for."""
    from sglang.srt.server_args import prepare_server_args

    (tmp_path / "specstore.toml").write_text(file)
    given = [str(tmp_path / "specstore.toml") if word == "FILE" else word for word in words]
    with pytest.raises(SystemExit) as ended:
        prepare_server_args(["--model-path", str(tmp_path), *given])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("specstore: ") and message in line


@pytest.mark.parametrize(
    ("algorithm", "warned"), [((), True), (("NGRAM",), True), (("SSSD",), False)], ids=str
)
def test_flags_that_no_algorithm_reads_are_warned_of_once(
    plugin, tmp_path, monkeypatch, capsys, algorithm, warned
):
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    monkeypatch.setattr(ServerArgs, "__post_init__", lambda self: None)  # no model is looked for
    monkeypatch.setenv("SPECSTORE_ENDPOINT", "")
    words = [word for name in algorithm for word in ("--speculative-algorithm", name)]
    prepare_server_args(
        ["--model-path", str(tmp_path), "--specstore-endpoint", "h:1", "--specstore-nodes", "3", *words]
    )
    said = [
        line.partition("specstore: ")[2]
        for line in capsys.readouterr().err.splitlines()
        if "specstore: " in line
    ]
    given = "--specstore-endpoint, --specstore-nodes"
    assert said == [f"{given}: no effect without a --speculative-algorithm of specstore"] * warned


def test_a_mistyped_variable_is_logged_with_the_option_that_it_resembles(monkeypatch, caplog):
    monkeypatch.setenv("SPECSTORE_NODEZ", "3")
    monkeypatch.setenv("SPECSTORE_ADMIN_TOKEN", "of another program")
    check_options()
    (record,) = caplog.records
    assert record.getMessage() == "specstore: SPECSTORE_NODEZ is no option, did you mean SPECSTORE_NODES?"
