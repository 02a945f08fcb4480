"""What a server's settings are for its draft model: each is given, and SGLang resolves what the draft process would."""

import argparse
import inspect
import json
import pkgutil
import runpy
import sys
from importlib import import_module
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("sglang")

from sglang.srt.arg_groups.overrides import resolved_view  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from datastore_service.protocol.types import Namespace  # noqa: E402
from sglang_patches.draft_process.arguments import (  # noqa: E402
    FOLLOWED,
    FOLLOWED_ON_ITS_KIND,
    OWN,
    QUANTIZATION,
    given_of,
)
from sglang_patches.draft_process.runner import server_args as draft_server_args  # noqa: E402
from sglang_patches.draft_process.settings import DraftSettings, draft_settings  # noqa: E402
from sglang_patches.host.versions import INSTALLED, TESTED  # noqa: E402
from sglang_patches.methods.registry import METHODS  # noqa: E402
from sglang_patches.options import Options  # noqa: E402
from tests.unit.plugin.platform import override_platform  # noqa: E402
from tests.unit.plugin.resolution import PLATFORMS, server_args  # noqa: E402

TABLE = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "settings.py"))
HERE = inspect.signature(ServerArgs).parameters
SAGUARO = "SAGUARO"

# Of each that the draft process may be told, a value that SGLang takes.
GIVEN = {
    "dtype": "float16",
    "trust_remote_code": True,
    "load_format": "safetensors",
    "model_loader_extra_config": '{"enable_multithread_load": true}',
    "download_dir": "/models",
    "model_impl": "transformers",
    "model_config_parser": "hf",
    "json_model_override_args": '{"rope_theta": 5000.0}',
    "weight_loader_disable_mmap": True,
    "weight_loader_prefetch_checkpoints": True,
    "weight_loader_prefetch_num_threads": 7,
    "weight_loader_drop_cache_after_load": True,
    "attention_backend": "triton",
    "prefill_attention_backend": "triton",
    "decode_attention_backend": "flashinfer",
    "sampling_backend": "pytorch",
    "moe_runner_backend": "triton",
    "flashinfer_mxfp4_moe_precision": "bf16",
    "kv_cache_dtype": "fp8_e4m3",
    "fp8_gemm_runner_backend": "triton",
    "fp4_gemm_runner_backend": "flashinfer_cutlass",
    "bf16_gemm_backend": "torch",
    "enable_lean_attention": False,
    "enable_tf32_matmul": True,
    "enable_fused_qk_norm_rope": True,
    "triton_attention_num_kv_splits": 5,
    "triton_attention_split_tile_size": 256,
    "flashinfer_autotune_skip_ops": ["fp8_gemm"],
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "quantization": "fp8",
    "speculative_draft_model_revision": "v2",
    "speculative_draft_load_format": "dummy",
    "speculative_draft_model_quantization": "w8a8_int8",
    "speculative_draft_kv_cache_dtype": "fp8_e5m2",
    "speculative_draft_attention_backend": "flashinfer",
    "speculative_moe_runner_backend": "triton_kernel",
    "decrypted_draft_config_file": "config.json",
}
TOLD = (*FOLLOWED, *FOLLOWED_ON_ITS_KIND, QUANTIZATION)

pytestmark = [
    pytest.mark.usefixtures("plugin"),
    pytest.mark.skipif(TESTED[-1] != INSTALLED, reason="the fields and values are the newest version's"),
]


def value_of(field):
    if field in GIVEN:
        return GIVEN[field]
    assert HERE[field].default is False, field
    return True


def settings_of(path, draft="", device="cuda:1", platform="hopper", name=SAGUARO, **given):
    """What the draft process is told, as it reads it."""
    given = {"speculative_algorithm": name, "speculative_draft_model_path": draft or path} | given
    args = server_args(path, platform, **given)
    method, namespace = METHODS[name], Namespace("m", "f" * 64)
    view, options = resolved_view(args), Options(draft_device=device)
    told = draft_settings(view, given_of(args), options, method, namespace, 4096, 1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["process", *told.flags()])
        return DraftSettings.parse(argparse.ArgumentParser())


def resolved(settings, platform="hopper"):
    """What SGLang makes of it in the draft process."""
    with override_platform(**PLATFORMS[platform]):
        return draft_server_args(settings)


def groups():
    """Each setting's group of SGLang's."""
    import sglang.srt.arg_groups.fields as package

    found = {}
    for module in pkgutil.iter_modules(package.__path__):
        for kind in vars(import_module(f"{package.__name__}.{module.name}")).values():
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and hasattr(kind, "_NS_PATH"):
                found |= dict.fromkeys(kind.__struct_fields__, kind._NS_PATH)
    return found


def test_every_setting_has_one_verdict_for_the_draft_model():
    names = [name for _, of_row in TABLE["draft_rows"]() for name in of_row]
    assert len(names) == len(set(names)) and set(names) <= HERE.keys()
    group = groups()
    assert group.keys() == HERE.keys()
    names += [name for row in TABLE["SETTINGS"] if row.verdict.startswith("refused") for name in row.given]
    assert not {name for name in HERE if name not in names and group[name] not in TABLE["TARGET_GROUPS"]}


@pytest.mark.parametrize("field", [field for field in TOLD if field in HERE])
def test_what_is_said_of_the_target_is_followed(model_path, field):
    path, value = model_path("dense"), value_of(field)
    settings = settings_of(path, **{field: value})
    arguments = {"model_path": path} | ({} if field == QUANTIZATION else {field: value})
    assert settings.arguments == arguments and settings.quantization == (
        value if field == QUANTIZATION else ""
    )
    assert getattr(resolved_view(resolved(settings)), field) == value


@pytest.mark.parametrize("field", [field for field in OWN if field in HERE][1:])
@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
def test_what_is_said_of_the_draft_model_wins(model_path, field, device):
    path, value = model_path("dense"), value_of(field)
    beside = {OWN[field]: value_of(OWN[field])} if OWN[field] in GIVEN else {}
    assert value not in beside.values()
    settings = settings_of(path, device=device, **beside, **{field: value})
    assert settings.arguments == {"model_path": path, OWN[field]: value} and not settings.quantization


@pytest.mark.parametrize("phase", ["prefill_attention_backend", "decode_attention_backend"])
def test_the_draft_model_s_backend_is_that_of_both_phases(model_path, phase):
    given = {phase: "triton", "speculative_draft_attention_backend": "flashinfer"}
    view = resolved_view(resolved(settings_of(model_path("dense"), **given)))
    assert (view.attention_backend, getattr(view, phase)) == ("flashinfer", None)


@pytest.mark.parametrize("field", [field for field in TOLD if field in HERE])
def test_on_the_cpu_beside_a_gpu_no_kernels_are_followed(model_path, field):
    path, value = model_path("dense"), value_of(field)
    settings = settings_of(path, device="cpu", **{field: value})
    assert settings.arguments == {"model_path": path} | ({field: value} if field in FOLLOWED else {})
    assert not settings.quantization


def test_on_the_cpu_sglang_takes_what_is_left(model_path):
    settings = settings_of(model_path("dense"), device="cpu", attention_backend="triton", dtype="float32")
    view = resolved_view(draft_server_args(settings))
    assert (view.device, view.attention_backend, view.sampling_backend) == ("cpu", "specstore_cpu", "pytorch")
    assert view.dtype == "float32"


@pytest.mark.parametrize("own", [None, "awq", "fp8"])
def test_a_quantised_checkpoint_keeps_its_numbers(model_path, tmp_path, own):
    """As with SGLang's own draft models."""
    path, draft = model_path("dense"), tmp_path / "draft"
    draft.mkdir()
    config = json.loads((Path(path) / "config.json").read_text())
    quantized = {"awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}}
    quantized["fp8"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (draft / "config.json").write_text(
        json.dumps(config | ({"quantization_config": quantized[own]} if own else {}))
    )
    args = resolved(settings_of(path, str(draft), quantization="w8a8_int8"))
    assert args._raw_input["quantization"] == (None if own else "w8a8_int8")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_default_backend_whose_kv_has_pages_is_replaced(model_path, platform):
    view = resolved_view(resolved(settings_of(model_path("dense"), platform=platform), platform))
    assert view.page_size == 1
    assert (
        view.attention_backend == {"ampere": "flashinfer", "hopper": "fa3", "blackwell": "triton"}[platform]
    )


@pytest.mark.parametrize("field", ["speculative_draft_attention_backend", "decode_attention_backend"])
def test_a_named_one_stops_the_start(model_path, field):
    settings = settings_of(
        model_path("dense"), **{field: "trtllm_mha", "prefill_attention_backend": "triton"}
    )
    with pytest.raises(
        ValueError, match="trtllm_mha, keeps KV in pages of 64.*--speculative-draft-attention-backend triton"
    ):
        resolved(settings)


def test_what_specstore_sets_is_not_the_target_s(model_path):
    given = {
        "page_size": 16,
        "attention_backend": "triton",
        "max_total_tokens": 999,
        "chunked_prefill_size": 512,
    }
    given |= {"max_running_requests": 3, "disable_radix_cache": False, "context_length": 2000}
    view = resolved_view(resolved(settings_of(model_path("dense"), **given)))
    assert view.page_size == 1 and view.max_total_tokens == Options().draft_tokens
    assert view.disable_radix_cache and view.chunked_prefill_size != 512 and view.base_gpu_id == 1


def test_weights_that_only_the_target_can_have_are_refused(model_path):
    given = {"load_format": "remote_instance", "remote_instance_weight_loader_seed_instance_ip": "127.0.0.1"}
    given |= {"remote_instance_weight_loader_seed_instance_service_port": 1}
    given |= {"remote_instance_weight_loader_send_weights_group_ports": [2]}
    with pytest.raises(ValueError, match="--load-format remote_instance .*--speculative-draft-load-format"):
        settings_of(model_path("dense"), **given)
    given |= {"speculative_draft_load_format": "safetensors"}
    assert settings_of(model_path("dense"), **given).arguments["load_format"] == "safetensors"


@pytest.mark.parametrize("field", [field for field in OWN if field in HERE][1:])
def test_without_a_draft_model_its_settings_are_refused(model_path, field):
    for name, called in (("SSSD", "SSSD"), ("ADAPTIVE", "ADAPTIVE"), ("SPECSTORE", "ADAPTIVE")):
        with pytest.raises(ValueError, match=f"{called}: {TABLE['flag'](field)} .* would have no effect"):
            server_args(model_path("dense"), "hopper", speculative_algorithm=name, **{field: value_of(field)})
