"""What the launcher of a split makes of its variables."""

import json
from pathlib import Path

import pytest

from sglang_patches.launch import serve_pd
from sglang_patches.launch.router import read_groups
from sglang_patches.launch.serve import SettingsError, engine_command, engine_environment, read_settings
from sglang_patches.methods.registry import HEADS
from tests.unit.launch.test_serve import flag

CHECKOUT = Path(__file__).parents[3]


def workers(device: str = "cpu", prefills: int = 2, decodes: int = 1):
    return serve_pd.instances(read_settings({"DEVICE": device}), prefills, decodes)


def test_every_instance_has_ports_of_its_own_and_its_role():
    started = workers()
    commands = [engine_command(worker, None, []) for worker in started]
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
        flag(engine_command(workers("cuda")[2], None, []), "--disaggregation-decode-retraction-backup")
        is None
    )


def test_the_router_knows_them_all():
    part = serve_pd.router_part(30000, {1: 11, 2: 12}, [3])
    assert part.environment["PORT"] == "30000" and flag(part.command, "--host") == "127.0.0.1"
    assert [(g.role, g.port, g.bootstrap_port) for g in read_groups(part.environment)] == [
        ("prefill", 1, 11),
        ("prefill", 2, 12),
        ("decode", 3, None),
    ]


def test_everything_starts_the_router_in_one_way():
    """What docs/ tell to type, what the images run and what `make serve-pd` and the tests start is the same command."""
    command = ["python", "-m", "sglang_patches.launch.router"]
    assert serve_pd.router_part(30000, {1: 11}, [3]).command[1:3] == command[1:]
    documented = (CHECKOUT / "docs/disaggregation.md").read_text()
    assert f"PREFILL=PREFILL:30000 DECODE=DECODE:30000 {' '.join(command)}\n" in documented
    for file in ("docker/engine.Dockerfile", "docker/compose.lab.yml"):
        assert json.dumps(command) in (CHECKOUT / file).read_text()
    written = [
        file
        for folder in ("docs", "docker", "sglang_patches", "benchmarks")
        for file in (CHECKOUT / folder).rglob("*")
    ]
    texts = {
        file.name: file.read_text()
        for file in written
        if file.suffix in (".md", ".py", ".yml", ".Dockerfile")
    }
    assert [name for name, text in texts.items() if "sglang_router.launch_router" in text] == ["router.py"]


@pytest.mark.parametrize("value", ["0", "-1", "65", "two", "²"])
def test_a_bad_number_of_instances_is_refused_by_name(value):
    with pytest.raises(SettingsError, match="^DECODES="):
        serve_pd.count({"DECODES": value}, "DECODES")


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_not_split(name):
    asked = read_settings({"ALGORITHM": name, "MODEL": "m", "DRAFT_MODEL": "d", "DEVICE": "cpu"})
    with pytest.raises(SettingsError, match=f"^ALGORITHM={name}: a head .* runs in one instance"):
        serve_pd.run(asked, [])


def test_an_embedded_datastore_cannot_be_shared():
    with pytest.raises(SettingsError, match="^DATASTORE="):
        serve_pd.run(read_settings({"DATASTORE": "embedded", "DEVICE": "cpu"}), [])
