"""What is checked, with which flags, on what."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sglang_patches.early_exit.fingerprint import model_fingerprint
from sglang_patches.methods.registry import DEFAULT, HEADS, METHODS, current_name

PLAIN = "plain"  # in the place of a method's name
DRAFTING = ("--speculative-", "--specstore-")  # flags that begin so
DRAFT_MODEL = "--speculative-draft-"  # of these the ones that a method without a draft process refuses
PACKAGES = ("specstore", "sglang", "torch", "triton", "flashinfer-python", "numpy")


@dataclass(frozen=True)
class Setup:
    """What is checked: a model on a device, with the engines' flags.

    model: folder.
    tokens: of an answer.
    flags: SGLang's and specstore's, from the command line.
    """

    model: Path
    device: str
    tokens: int
    flags: tuple[str, ...] = ()

    @property
    def asked_method(self) -> str | None:
        """The one that the flags name."""
        name = value_of(self.flags, "--speculative-algorithm")
        return current_name(name) if name else None

    @property
    def method(self) -> str:
        """The one that is checked where not all are."""
        return self.asked_method or DEFAULT

    @property
    def has_head(self) -> bool:
        """Whether a head of the model drafts, and retrieval beside it."""
        return self.method in HEADS

    @property
    def lacks_head(self) -> bool:
        """Whether SGLang needs the path of a head and the flags have none."""
        path = value_of(self.flags, "--speculative-draft-model-path")
        return self.has_head and HEADS[self.method].needs_draft_model and not path

    def engine_flags(self, method: str, target: Path, early_exit: Path | None) -> list[str]:
        """The words of an engine. early_exit: file for a method that reads one and has none by its flags. Where no draft model is
        given, the model that is checked drafts."""
        words = ["--model-path", str(target), "--device", self.device]
        if self.device == "cpu":
            words += ["--sampling-backend", "pytorch"]
        if method == PLAIN:
            return words + without(self.flags, DRAFTING)
        words += ["--speculative-algorithm", method]
        known = METHODS.get(method)  # another plugin's method has what its flags say
        own = without(self.flags, ("--speculative-algorithm",))
        if method in HEADS:
            return [*words, "--specstore-beside-head", *own]
        if known is None:
            return words + own
        if not known.draft_process:
            return words + without(own, (DRAFT_MODEL,))
        defaults = {"--speculative-draft-model-path": str(self.model)}
        if self._shares_gpu and not known.draft_device:
            defaults["--specstore-draft-device"] = "cuda:0"
        if known.early_exit:
            defaults["--specstore-early-exit"] = str(early_exit)
        given = {word for word in own if word.startswith("--")}
        return words + [word for name in defaults.keys() - given for word in (name, defaults[name])] + own

    @property
    def _shares_gpu(self) -> bool:
        """Whether there is no second GPU for a draft model."""
        import torch

        return self.device != "cpu" and torch.cuda.device_count() == 1

    def about(self) -> dict:
        """What results belong to: two checks of which this is equal can go on with each other's."""
        return {
            "packages": {name: installed for name in PACKAGES if (installed := _version(name))},
            "python": platform.python_version(),
            **_device(self.device),
            "model": self.model.name,
            "weights": model_fingerprint(self.model),
            "tokens": self.tokens,
            "flags": list(self.flags),
        }


def value_of(flags: Sequence[str], name: str) -> str | None:
    """The value that the flag has; the last one counts."""
    values = [value for flag, value in zip(flags, flags[1:], strict=False) if flag == name]
    values += [flag.removeprefix(name + "=") for flag in flags if flag.startswith(name + "=")]
    return values[-1] if values else None


def without(flags: Sequence[str], beginnings: tuple[str, ...]) -> list[str]:
    """The flags, with their values, that begin otherwise."""
    kept, keep = [], True
    for word in flags:
        if word.startswith("--"):
            keep = not word.startswith(beginnings)
        if keep:
            kept.append(word)
    return kept


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device(device: str) -> dict:
    if device == "cpu":
        return {"device": _processor()}
    import torch

    return {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "driver": _driver()}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True)
    return said.stdout.strip().splitlines()[0] if said.returncode == 0 and said.stdout.strip() else "unknown"
