"""Which tokenizer made the ids: text under one tokenizer means nothing under another."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from datastore_service.storage.errors import StorageError

TOKENIZER_FILE = "tokenizer.json"


def tokenizer_fingerprint(folder: Path | str) -> str:
    """64 hexadecimal digits: SHA-256 over what decides the ids of a Hugging Face tokenizer.

    Covers normalizer, pre-tokenizer, model (vocabulary and merges) and added tokens of `tokenizer.json`; not its
    formatting, truncation, padding or post-processor, which do not change a token's meaning. The same on every
    machine. folder: holds `tokenizer.json`, or is that file. Raises StorageError."""
    document = _load(tokenizer_path(folder))
    merges = document["model"].get("merges", [])
    document["model"]["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
    parts = ("added_tokens", "normalizer", "pre_tokenizer", "model")
    meaning = {part: document.get(part) for part in parts}
    meaning["added_tokens"] = sorted(meaning["added_tokens"] or [], key=lambda token: token["id"])
    text = json.dumps(meaning, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def tokenizer_path(folder: Path | str) -> Path:
    path = Path(folder)
    return path / TOKENIZER_FILE if path.is_dir() else path


def _load(path: Path) -> dict:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(path, "file", error.strerror or str(error)) from error
    except ValueError as error:
        raise StorageError(path, "file", f"not JSON: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise StorageError(path, "model", "missing, this is not a tokenizer.json")
    return document
