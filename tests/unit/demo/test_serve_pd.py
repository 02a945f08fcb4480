"""What the launcher of a split makes of its variables."""

import pytest

from sglang_patches.demo import serve_pd
from sglang_patches.demo.serve import SettingsError, engine_command, engine_environment, read_settings
from tests.unit.demo.test_serve import flag


def workers(device: str = "cpu", prefills: int = 2, decodes: int = 1):
    return serve_pd.instances(read_settings({"DEVICE": device}), prefills, decodes)


def test_every_instance_has_ports_of_its_own_and_its_role():
    started = workers()
    commands = [engine_command(worker, "m", None, []) for worker in started]
    assert [flag(command, "--disaggregation-mode") for command in commands] == ["prefill"] * 2 + ["decode"]
    assert len({flag(command, "--port") for command in commands}) == 3
    bootstraps = [flag(command, "--disaggregation-bootstrap-port") for command in commands]
    assert bootstraps[0] != bootstraps[1] and bootstraps[2] is None
    assert {flag(command, "--speculative-algorithm") for command in commands} == {"SSSD"}


def test_only_cpus_move_kv_over_tcp_and_wait_quietly():
    (on_cpu, *_), (on_gpu, *_) = workers(), workers("cuda")
    assert engine_environment(on_cpu)["MOONCAKE_PROTOCOL"] == "tcp"
    assert engine_environment(on_gpu) == {}
    assert (
        flag(engine_command(workers("cuda")[2], "m", None, []), "--disaggregation-decode-retraction-backup")
        is None
    )


def test_the_router_knows_them_all():
    command = serve_pd.router_command(30000, {1: 11, 2: 12}, [3])
    text = " ".join(command)
    assert "--prefill http://127.0.0.1:1 11 --prefill http://127.0.0.1:2 12" in text
    assert "--decode http://127.0.0.1:3" in text and flag(command, "--port") == "30000"


@pytest.mark.parametrize("value", ["0", "-1", "65", "two", "²"])
def test_a_bad_number_of_instances_is_refused_by_name(value):
    with pytest.raises(SettingsError, match="^DECODES="):
        serve_pd.count({"DECODES": value}, "DECODES")


def test_an_embedded_datastore_cannot_be_shared():
    with pytest.raises(SettingsError, match="^DATASTORE="):
        serve_pd.run(read_settings({"DATASTORE": "embedded", "DEVICE": "cpu"}), [])
