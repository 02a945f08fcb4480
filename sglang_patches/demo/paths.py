"""The folders of the demo's files."""

import os
from pathlib import Path

MODEL_NAME = "SmolLM2-135M-Instruct"


def cache_root() -> Path:
    """`$SPECSTORE_CACHE`, else `specstore` under the user's cache directory (`$XDG_CACHE_HOME`, `~/.cache`)."""
    if root := os.environ.get("SPECSTORE_CACHE"):
        return Path(root).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specstore"


def demo_model_dir() -> Path:
    """The demo model's Hugging Face folder: `<cache root>/models/SmolLM2-135M-Instruct`."""
    return cache_root() / "models" / MODEL_NAME
