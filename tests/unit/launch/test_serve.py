"""What the launcher makes of its variables."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_patches.launch import serve
from sglang_patches.launch.serve import (
    SettingsError,
    engine_command,
    engine_environment,
    read_settings,
    sglang_flags,
)
from sglang_patches.methods.registry import METHODS, Method, current_name


def flag(command: list[str], name: str) -> str | None:
    """The value that SGLang's parser would take: the last one."""
    places = [index for index, word in enumerate(command) if word == name]
    return command[places[-1] + 1] if places else None


def settings(**variables: str):
    return read_settings({"DEVICE": "cpu"} | variables)


def test_defaults():
    default = read_settings({"MODEL": "", "PORT": "", "ALGORITHM": "", "DEVICE": "", "DATASTORE": ""})
    assert default == read_settings({})
    assert (default.port, default.algorithm, default.datastore) == (30000, "SSSD", "grpc")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PORT", "0"),
        ("PORT", "65536"),
        ("PORT", "http"),
        ("PORT", "³"),
        ("DEVICE", "tpu"),
        ("DATASTORE", "redis"),
        ("DATASTORE", "host:99999"),
    ],
)
def test_a_bad_value_is_refused_by_name(variable, value):
    with pytest.raises(SettingsError, match=f"^{variable}="):
        read_settings({variable: value})


def test_the_engine_drafts_from_the_service():
    command = engine_command(settings(), Path("prior"), [])
    assert flag(command, "--speculative-algorithm") == "SSSD"
    assert flag(command, "--specstore-endpoint") == f"127.0.0.1:{serve.DATASTORE_PORT}"
    assert flag(command, "--specstore-prior") is None


def test_the_embedded_datastore_gets_the_prior():
    command = engine_command(settings(DATASTORE="embedded"), Path("prior"), [])
    assert flag(command, "--specstore-endpoint") == "embedded"
    assert flag(command, "--specstore-prior") == "prior"


def test_a_datastore_that_already_runs_is_used_as_it_is():
    existing = settings(DATASTORE="unix:/run/datastore.sock")
    assert not existing.starts_service
    assert not existing.needs_prior
    assert flag(engine_command(existing, None, []), "--specstore-endpoint") == "unix:/run/datastore.sock"


def test_plain_decoding_has_neither_algorithm_nor_datastore():
    plain = settings(ALGORITHM="none")
    assert not plain.starts_service
    assert not plain.needs_prior
    command = engine_command(plain, None, [])
    assert not [word for word in command if word.startswith("--spec")]


def test_only_a_cpu_gets_the_cpu_flags():
    on_cpu, on_gpu = settings(), settings(DEVICE="cuda")
    assert flag(engine_command(on_cpu, None, []), "--attention-backend") == "specstore_cpu"
    assert flag(engine_command(on_gpu, None, []), "--attention-backend") is None
    assert engine_environment(on_cpu) == {"SGLANG_USE_CPU_ENGINE": "1"}
    assert engine_environment(on_gpu) == {}


@pytest.fixture
def demo_folders(monkeypatch):
    """Where the demo's models would be made."""
    monkeypatch.setattr(serve, "ensure", lambda: Path("demo"))
    monkeypatch.setattr(serve, "_demo_head", lambda: "head")
    monkeypatch.setattr(serve, "deepened_target", lambda: Path("deepened"))


@pytest.fixture
def duet(monkeypatch) -> str:
    """A method that drafts in a process of its own."""
    method = Method(name="DUET", summary="", parts=lambda around: None, draft_parts=lambda around: None)
    monkeypatch.setitem(METHODS, method.name, method)
    return method.name


@pytest.mark.usefixtures("demo_folders")
@pytest.mark.parametrize(
    ("given", "served"),
    [
        ({}, ("deepened", "demo")),
        ({"DRAFT_MODEL": "d"}, ("deepened", "d")),
        ({"MODEL": "m", "DRAFT_MODEL": "d"}, ("m", "d")),
    ],
)
def test_a_method_with_a_draft_process_gets_a_target_and_a_draft(duet, given, served):
    command = engine_command(serve.with_models(settings(ALGORITHM=duet, **given)), None, [])
    assert (flag(command, "--model-path"), flag(command, "--speculative-draft-model-path")) == served


@pytest.mark.usefixtures("demo_folders")
@pytest.mark.parametrize("algorithm", ["sssd", "ngram", "none"])
@pytest.mark.parametrize(("given", "served"), [({}, "demo"), ({"MODEL": "m"}, "m")])
def test_any_other_gets_one_model(algorithm, given, served):
    command = engine_command(serve.with_models(settings(ALGORITHM=algorithm, **given)), None, [])
    assert flag(command, "--model-path") == served
    assert flag(command, "--speculative-draft-model-path") is None


def test_a_model_of_ones_own_needs_a_draft_of_ones_own(duet):
    with pytest.raises(SettingsError, match="^DRAFT_MODEL='': .*give a small one with MODEL's tokenizer"):
        settings(ALGORITHM=duet.lower(), MODEL="m")


@pytest.mark.usefixtures("demo_folders")
@pytest.mark.parametrize(
    ("given", "served"),
    [
        ({"ALGORITHM": "eagle3"}, ("demo", "head")),
        ({"ALGORITHM": "standalone"}, ("deepened", "demo")),
        ({"ALGORITHM": "eagle3", "MODEL": "m", "DRAFT_MODEL": "d"}, ("m", "d")),
        ({"ALGORITHM": "nextn", "MODEL": "m"}, ("m", None)),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_head_stands_beside_the_datastore(given, served, device):
    command = engine_command(serve.with_models(settings(DEVICE=device, **given)), None, [])
    assert (flag(command, "--model-path"), flag(command, "--speculative-draft-model-path")) == served
    assert "--specstore-beside-head" in command
    assert flag(command, "--speculative-eagle-topk") == ("1" if device == "cpu" else None)


def test_a_head_of_a_model_of_ones_own_must_be_given():
    with pytest.raises(SettingsError, match="^DRAFT_MODEL='': ALGORITHM=EAGLE3 drafts with a model"):
        settings(ALGORITHM="EAGLE3", MODEL="m")


@pytest.mark.parametrize("name", ["EAGLE", "NEXTN"])
def test_the_demo_model_has_one_kind_of_head(name):
    with pytest.raises(
        SettingsError, match=f"^MODEL='': ALGORITHM={name} .* the demo model has no such head"
    ):
        settings(ALGORITHM=name)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_head_has_no_role(role):
    with pytest.raises(SettingsError, match="^ALGORITHM=EAGLE3: a head .* runs in one instance"):
        settings(ALGORITHM="eagle3", ROLE=role)


@pytest.mark.parametrize("algorithm", ["SSSD", "NGRAM", "NONE"])
def test_a_draft_that_nobody_would_use_is_refused(algorithm):
    with pytest.raises(
        SettingsError, match=f"^DRAFT_MODEL='d': ALGORITHM={algorithm} drafts without a model"
    ):
        settings(ALGORITHM=algorithm, DRAFT_MODEL="d")


def test_flags_given_by_hand_win():
    command = engine_command(settings(), None, ["--max-total-tokens", "99", "--host", "0.0.0.0"])
    assert flag(command, "--max-total-tokens") == "99"
    assert flag(command, "--host") == "0.0.0.0"


@pytest.mark.parametrize("algorithm", ["SSSD", "NONE", "NEXTN"])
def test_an_algorithm_that_there_is(algorithm):
    serve.refuse_unknown_algorithm(algorithm)


def test_a_method_s_earlier_name_is_taken_for_a_version(caplog):
    current_name.cache_clear()
    assert [settings(ALGORITHM="specstore").algorithm for _ in range(2)] == ["ADAPTIVE", "ADAPTIVE"]
    assert [record.getMessage() for record in caplog.records] == [
        "specstore: the method SPECSTORE is now called ADAPTIVE; version 0.3 drops the earlier name"
    ]


def test_an_algorithm_of_nobody_is_refused():
    with pytest.raises(
        SettingsError, match="^ALGORITHM=EAGEL: there is no such algorithm, did you mean EAGLE"
    ):
        serve.refuse_unknown_algorithm("EAGEL")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MODEL": "/nope"}, "MODEL=/nope: no such folder"),
        ({"MODEL": "./nope", "ALGORITHM": "none"}, "MODEL=./nope: no such folder"),
        ({"DRAFT_MODEL": "../nope", "ALGORITHM": "saguaro"}, "DRAFT_MODEL=../nope: no such folder"),
        ({"EARLY_EXIT": "nope", "ALGORITHM": "mirror"}, "EARLY_EXIT=nope: no such file"),
    ],
)
def test_a_path_to_nothing_is_refused_before_anything_is_made(variables, message):
    with pytest.raises(SettingsError) as refused:
        serve.refuse_missing_files(settings(**variables))
    assert str(refused.value) == message


def test_names_of_a_hub_are_not_paths(tmp_path):
    serve.refuse_missing_files(settings(MODEL="owner/name"))
    serve.refuse_missing_files(settings(MODEL=str(tmp_path)))


@pytest.mark.parametrize(
    ("device", "flags", "cpu_dtype", "multiplies", "served"),
    [
        ("cpu", [], "", True, "bfloat16"),
        ("cpu", [], "", False, "float32"),
        ("cpu", [], "float32", True, "float32"),
        ("cpu", ["--page-size", "4", "--dtype", "float16"], "float32", True, "float16"),
        ("cuda", [], "float32", True, ""),
        ("cuda", ["--dtype=bfloat16"], "", True, "bfloat16"),
    ],
)
def test_the_dtype_is_what_the_processor_multiplies(
    monkeypatch, device, flags, cpu_dtype, multiplies, served
):
    monkeypatch.setattr("sglang_patches.cpu.packed_weights.multiplies_bfloat16", lambda: multiplies)
    found = serve.on_this_machine(settings(DEVICE=device), flags, cpu_dtype)
    assert found.dtype == served
    assert flag(engine_command(found, None, []), "--dtype") == (served or None)


def test_the_ready_line_says_device_and_dtype(capsys):
    serve.announce(replace(settings(), dtype="bfloat16"), 30.2, Path("logs"))
    assert "ready in 30 s on cpu in bfloat16: http://127.0.0.1:30000/v1 (SSSD, " in capsys.readouterr().out
    serve.announce(settings(DEVICE="cuda"), 30.2, Path("logs"))
    assert "ready in 30 s on cuda: http" in capsys.readouterr().out


def test_a_taken_port_is_refused_before_anything_starts(free_port):
    with (
        socket.create_server(("127.0.0.1", free_port)),
        pytest.raises(SettingsError, match=f"PORT={free_port}: the port is taken"),
    ):
        serve.refuse_taken_ports(settings(PORT=str(free_port), ALGORITHM="none"))


def test_a_model_without_a_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(SettingsError, match=f"^MODEL={tmp_path}: no tokenizer\\.json"):
        serve.build_prior(str(tmp_path))


@pytest.mark.parametrize("model", ["no/such/folder", "/no/such/folder", "nobody/nothing"])
def test_a_model_that_is_nowhere_is_refused_by_name(monkeypatch, model):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SettingsError, match=f"^MODEL={model}: .*neither"):
        serve.build_prior(model)


def test_a_prior_that_failed_to_build_is_not_kept(demo_model, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECSTORE_CACHE", str(tmp_path))
    monkeypatch.setattr(serve, "CORPUS", demo_model / "config.json")
    monkeypatch.setattr(serve, "SPECSTORE", ("false",))
    with pytest.raises(serve.subprocess.CalledProcessError):
        serve.build_prior(str(demo_model))
    assert list((tmp_path / "priors").iterdir()) == []


@pytest.mark.parametrize("launcher", ["serve", "serve_pd", "demo"])
@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_starts_nothing(launcher, word):
    """Even with settings that would be refused."""
    command = [sys.executable, "-m", f"sglang_patches.launch.{launcher}", word]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PORT": "none"})
    assert done.returncode == 0 and done.stderr == ""
    assert f"`make {launcher.replace('_', '-')}`" in done.stdout


def test_other_words_are_sglang_s():
    words = ["--page-size", "4", "--he", "-x", "--", "y"]
    assert sglang_flags(words) == words
