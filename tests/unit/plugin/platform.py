"""A machine of our choosing, for SGLang's resolution of arguments."""

import contextlib
import sys
from collections.abc import Iterator
from unittest import mock

from sglang.srt import runtime_context

from sglang_patches.host.symbols import drift_message

# What is asked -> the function that SGLang 0.5.17 asks. Each module imports those that it needs by name.
_FUNCTIONS = {
    "is_cuda": "is_cuda",
    "has_flashinfer": "is_flashinfer_available",
    "is_sm90": "is_sm90_supported",
    "is_hopper_with_cuda_12_3": "is_hopper_with_cuda_12_3",
    "is_sm100": "is_sm100_supported",
    "is_sm100_or_sm110": "is_sm100_or_sm110_supported",
    "is_sm120": "is_sm120_supported",
    "is_blackwell": "is_blackwell_supported",
    "device_sm": "get_device_sm",
    "device_capability": "get_device_capability",
}
_WHO_ASKS = (
    "sglang.srt.server_args",
    "sglang.srt.arg_groups.",
    "sglang.srt.configs.",
    "sglang.srt.utils.common",
)


@contextlib.contextmanager
def override_functions(**facts: object) -> Iterator[None]:
    drift_message()  # imports all: no module of SGLang may be imported under a wrong impression
    modules = [module for name, module in sys.modules.items() if name.startswith(_WHO_ASKS)]
    with contextlib.ExitStack() as stack:
        asked = {name: facts.get(fact, False) for fact, name in _FUNCTIONS.items()}
        asked["get_device_memory_capacity"] = None
        for name, value in asked.items():
            for module in modules:
                if name in vars(module):
                    stack.enter_context(mock.patch.object(module, name, lambda *_, value=value: value))
        yield


override_platform = getattr(runtime_context, "override_platform", override_functions)
