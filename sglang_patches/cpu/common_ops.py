"""The module that SGLang's kernel package `sgl_kernel` imports by this name when its compiled library does not load.

It stands at the top level, so that it is found before any plugin has run, in every process that SGLang spawns. With a GPU the
compiled library loads and nothing imports this.
"""

import os

if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
    raise ImportError(
        "specstore serves on a CPU with SGLANG_USE_CPU_ENGINE=1 in the environment; it is not set"
    )

from sglang_patches.cpu import library

OPERATORS = library.register()
