import argparse

import pytest

from sglang_patches.options import Options, add_flags, export_flags, load_options


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
    ],
)
def test_bad_values_name_the_field(values, message):
    with pytest.raises(ValueError, match=message):
        load_options(values)


def test_unknown_key_in_the_file_is_named(tmp_path):
    file = tmp_path / "specstore.toml"
    file.write_text("endpiont = 'x'\n")
    with pytest.raises(ValueError, match="unknown specstore option endpiont, did you mean endpoint\\?$"):
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


def test_tls_files_are_read_where_they_are_named(tmp_path):
    assert load_options({"SPECSTORE_ENDPOINT": "host:1"}).tls() is None
    gone = {"SPECSTORE_ENDPOINT": "host:1", "SPECSTORE_TLS_CA": str(tmp_path / "gone")}
    with pytest.raises(ValueError, match=f"^tls-ca: {tmp_path}/gone: No such file or directory$"):
        load_options(gone).tls()
