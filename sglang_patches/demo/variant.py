"""Models made from another's weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def write_variant(source: Path, out: Path, change: Callable[[dict, dict], None]) -> None:
    """Writes into the empty folder `out` the model of `source`, whose weights are one file. change: changes the state dictionary
    and the configuration in place."""
    from safetensors.torch import load_file, save_file

    weights, config = load_file(source / WEIGHTS), json.loads((source / CONFIG).read_text())
    change(weights, config)
    for file in source.iterdir():
        if file.name not in (WEIGHTS, CONFIG):
            shutil.copyfile(file, out / file.name)
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, out / WEIGHTS, {"format": "pt"})
