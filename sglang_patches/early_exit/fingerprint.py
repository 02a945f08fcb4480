"""Names a model by its weights: an early exit belongs to one. Without torch, which `check` does not import to read its words."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_SAMPLES, _BYTES = 64, 1 << 16  # of each file


def model_fingerprint(folder: Path) -> str:
    """Hexadecimal, of the weight files' names and sizes and of samples of their content: a model of a hundred gigabytes takes no
    longer than a small one. Raises ValueError for a folder without weights."""
    files = sorted(file for pattern in WEIGHTS for file in folder.glob(pattern))
    if not files:
        raise ValueError(f"no weights ({', '.join(WEIGHTS)}) in {folder}")
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        for part in _samples(file):
            digest.update(part)
    return digest.hexdigest()[:32]


def _samples(file: Path) -> Iterator[bytes]:
    """Evenly spread over the file, the beginning (which names the tensors) and the end included."""
    last = max(0, file.stat().st_size - _BYTES)
    with file.open("rb") as opened:
        for at in sorted({last * sample // (_SAMPLES - 1) for sample in range(_SAMPLES)}):
            opened.seek(at)
            yield opened.read(_BYTES)


def model_folder(model: str, revision: str | None = None) -> Path:
    """The folder of a model that is on this machine. Raises ValueError for a model that is not here.

    model: a folder, or a hub name.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"{model} is neither a folder nor a model of the hub's cache on this machine"
        ) from error
