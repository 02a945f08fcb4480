"""What the launcher makes of its variables."""

import socket
from pathlib import Path

import pytest

from sglang_patches.launch import serve
from sglang_patches.launch.serve import SettingsError, engine_command, engine_environment, read_settings


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
    command = engine_command(settings(), "m", Path("prior"), [])
    assert flag(command, "--speculative-algorithm") == "SSSD"
    assert flag(command, "--specstore-endpoint") == f"127.0.0.1:{serve.DATASTORE_PORT}"
    assert flag(command, "--specstore-prior") is None


def test_the_embedded_datastore_gets_the_prior():
    command = engine_command(settings(DATASTORE="embedded"), "m", Path("prior"), [])
    assert flag(command, "--specstore-endpoint") == "embedded"
    assert flag(command, "--specstore-prior") == "prior"


def test_a_datastore_that_already_runs_is_used_as_it_is():
    existing = settings(DATASTORE="unix:/run/datastore.sock")
    assert not existing.starts_service
    assert not existing.needs_prior
    assert flag(engine_command(existing, "m", None, []), "--specstore-endpoint") == "unix:/run/datastore.sock"


def test_plain_decoding_has_neither_algorithm_nor_datastore():
    plain = settings(ALGORITHM="none")
    assert not plain.starts_service
    assert not plain.needs_prior
    command = engine_command(plain, "m", None, [])
    assert not [word for word in command if word.startswith("--spec")]


def test_only_a_cpu_gets_the_cpu_flags():
    on_cpu, on_gpu = settings(), settings(DEVICE="cuda")
    assert flag(engine_command(on_cpu, "m", None, []), "--attention-backend") == "specstore_cpu"
    assert flag(engine_command(on_gpu, "m", None, []), "--attention-backend") is None
    assert engine_environment(on_cpu) == {"SGLANG_USE_CPU_ENGINE": "1"}
    assert engine_environment(on_gpu) == {}


def test_flags_given_by_hand_win():
    command = engine_command(settings(), "m", None, ["--max-total-tokens", "99", "--host", "0.0.0.0"])
    assert flag(command, "--max-total-tokens") == "99"
    assert flag(command, "--host") == "0.0.0.0"


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
