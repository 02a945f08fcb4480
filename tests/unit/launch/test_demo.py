"""What the launcher of the demo's page starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from sglang_patches.launch import demo
from sglang_patches.launch.serve import DATASTORE_PORT, SettingsError, engine_command, read_settings
from tests.unit.launch.test_serve import flag

TOKENIZER = Path("tokenizer.json")


def settings(**variables: str):
    return read_settings({"MODEL": "/models/target", "PORT": "8000", "DEVICE": "cpu"} | variables)


def parts(extra: tuple[str, ...] = (), prior: Path | None = Path("prior"), **variables: str):
    return {part.name: part for part in demo.parts_of(settings(**variables), TOKENIZER, prior, list(extra))}


def test_one_target_with_and_without_the_method_behind_the_page():
    started = parts()
    assert list(started) == ["datastore", "plain", "method", "page"]
    plain, method, page = (started[name].command for name in ("plain", "method", "page"))
    assert (
        flag(plain, "--model-path")
        == flag(method, "--model-path")
        == flag(page, "--model")
        == "/models/target"
    )
    assert flag(plain, "--speculative-algorithm") is None
    assert flag(plain, "--specstore-endpoint") is None
    assert flag(method, "--speculative-algorithm") == flag(page, "--method") == "SSSD"
    assert flag(method, "--specstore-endpoint") == f"127.0.0.1:{DATASTORE_PORT}"
    assert flag(page, "--port") == "8000"
    ports = [flag(plain, "--port"), flag(method, "--port")]
    assert ports == [flag(page, "--plain-port"), flag(page, "--method-port")]
    assert len({*ports, "8000"}) == 3
    assert flag(page, "--tokenizer") == str(TOKENIZER)


def test_the_datastore_has_a_port_of_its_own_beside_make_serve():
    own = replace(settings(), datastore_port=7777)
    started = {part.name: part for part in demo.parts_of(own, TOKENIZER, Path("prior"), [])}
    assert flag(started["datastore"].command, "--listen") == "127.0.0.1:7777"
    assert flag(started["method"].command, "--specstore-endpoint") == "127.0.0.1:7777"


def test_the_draft_model_is_the_method_s_alone():
    started = parts(ALGORITHM="SAGUARO", DRAFT_MODEL="/models/draft")
    assert flag(started["method"].command, "--speculative-draft-model-path") == "/models/draft"
    assert flag(started["plain"].command, "--speculative-draft-model-path") is None


def test_both_servers_get_the_flags_and_the_same_start():
    """They differ in the port and in the method."""
    started = parts(("--dtype", "bfloat16"))
    plain, method = started["plain"].command, started["method"].command
    assert "--sleep-on-idle" in plain and flag(plain, "--dtype") == "bfloat16"
    own = method.index("--speculative-algorithm")
    assert [word for word in method[:own] + method[own + 4 :] if word != flag(method, "--port")] == [
        word for word in plain if word != flag(plain, "--port")
    ]
    assert started["plain"].environment == started["method"].environment


def test_two_servers_share_a_gpu():
    assert flag(parts()["plain"].command, "--mem-fraction-static") is None
    on_gpu = parts(DEVICE="cuda")
    for name in ("plain", "method"):
        assert flag(on_gpu[name].command, "--mem-fraction-static") == "0.4"


def test_an_embedded_datastore_has_the_prior_and_no_service():
    started = parts(DATASTORE="embedded")
    assert list(started) == ["plain", "method", "page"]
    assert flag(started["method"].command, "--specstore-prior") == "prior"
    assert flag(started["plain"].command, "--specstore-prior") is None


@pytest.mark.parametrize("algorithm", ["none", "NGRAM"])
def test_only_a_method_that_names_its_sources_is_compared(algorithm):
    with pytest.raises(SettingsError, match=f"^ALGORITHM={algorithm.upper()}: .*SSSD"):
        demo.run(settings(ALGORITHM=algorithm), [])


def test_an_instance_of_a_split_is_refused():
    with pytest.raises(SettingsError, match="^ROLE="):
        demo.run(settings(ROLE="decode"), [])


def test_a_model_without_a_tokenizer_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(SettingsError, match="^MODEL=.*tokenizer.json"):
        demo.run(settings(MODEL=str(tmp_path)), [])


def test_plain_decoding_keeps_what_is_not_the_method_s():
    method = settings(ALGORITHM="MIRROR", DRAFT_MODEL="/models/draft", EARLY_EXIT="/models/exit")
    plain = demo.plain(method)
    assert "--specstore-early-exit" not in engine_command(plain, None, [])
    assert plain == replace(method, algorithm="NONE", draft_model="", early_exit="")


def test_no_server_takes_the_page_s_port(monkeypatch):
    monkeypatch.setattr(demo, "free_port", iter([8000, 8001]).__next__)
    assert demo.behind(settings()).port == 8001
