"""Identifies a tokenizer: ids of one tokenizer mean nothing under another."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from datastore_service.storage.errors import StorageError

TOKENIZER_FILE = "tokenizer.json"


def tokenizer_fingerprint(folder: Path | str) -> str:
    """64 hexadecimal digits: SHA-256 of what determines the ids of a Hugging Face tokenizer.

    It covers the normalizer, pre-tokenizer, model (vocabulary and merges) and added tokens of `tokenizer.json`. It does
    not cover formatting, truncation, padding and post-processor, which do not change a token's meaning. It is the same
    on every machine. folder: holds `tokenizer.json`, or is that file. Raises StorageError."""
    path = tokenizer_path(folder)
    try:
        text = json.dumps(_meaning(path), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    except RecursionError:
        raise StorageError(path, "file", "not JSON: nested too deeply") from None
    return hashlib.sha256(text.encode()).hexdigest()


def _meaning(path: Path) -> dict:
    document = _load(path)
    document["model"]["merges"] = _merges(path, document["model"].get("merges", []))
    meaning = {part: document.get(part) for part in ("normalizer", "pre_tokenizer", "model")}
    return meaning | {"added_tokens": _added_tokens(path, document.get("added_tokens") or [])}


def _merges(path: Path, merges: object) -> list[str]:
    """Each merge as `"a b"`; newer files write `["a", "b"]`."""
    try:
        return [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]  # type: ignore[attr-defined]
    except TypeError:
        raise StorageError(path, "model.merges", "not a list of strings or of lists of strings") from None


def _added_tokens(path: Path, tokens: object) -> list[dict]:
    """The added tokens in the order of their ids."""
    try:
        return sorted(tokens, key=lambda token: int(token["id"]))  # type: ignore[call-overload]
    except (TypeError, ValueError, KeyError):
        raise StorageError(path, "added_tokens", "not a list of objects with a number `id`") from None


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
