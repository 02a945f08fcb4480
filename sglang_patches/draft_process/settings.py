"""What a draft process is told at its start, as flags of its command line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datastore_service.protocol.types import Namespace
from sglang_patches.draft_process.arguments import draft_arguments, followed_quantization
from sglang_patches.options import Options

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from sglang_patches.methods.registry import Method


UNUSED_BYTES = (
    1 << 30
)  # a driver takes some hundreds of megabytes of a GPU that nobody uses, a server of SGLang's gigabytes
_PARSERS: dict[str, Callable[[str], object]] = {
    "str": str,
    "int": int,
    "bool": lambda text: text == "True",
    "dict[str, object]": json.loads,
}


class Gpus:
    """The GPUs that this process sees, and what of their memory is in use."""

    def count(self) -> int:
        """0 without one, where a server on a GPU is only resolved."""
        import torch  # late: its threads get the cores that the draft process has then

        return torch.cuda.device_count()

    def bytes_in_use(self, index: int) -> int:
        """Bytes of the GPU's memory that all processes of the host use, as `nvidia-smi` has it. Raises what torch and NVML raise where
        that cannot be told."""
        import torch

        return torch.cuda.device_memory_used(index)


GPUS = Gpus()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """The settings of a draft process. All other options are read as the worker reads them.

    method: its name in the registry.
    arguments: SGLang's, of the draft model.
    quantization: of a checkpoint that is not quantised, "" for none.
    tokenizer: folder of the target's, "" where requests bring token ids alone.
    tokenizer_revision: of a hub's tokenizer, "" for the newest.
    device: `cpu` or `cuda:N`.
    tokens: slots of the draft model's KV cache.
    sessions: most that are drafted for at once.
    rows: of a draft forward, and outcomes guessed at once.
    lookahead: tokens drafted after each outcome.
    namespace, fingerprint: model and tokenizer of the datastore's namespace.
    context_length, vocabulary: the target's.
    serial: whether the target has the same device.
    cores: those that the process is pinned to, separated by commas, "" for none.
    """

    method: str
    arguments: dict[str, object]
    quantization: str
    tokenizer: str
    tokenizer_revision: str
    device: str
    tokens: int
    sessions: int
    rows: int
    lookahead: int
    namespace: str
    fingerprint: str
    context_length: int
    vocabulary: int
    serial: bool
    cores: str

    @property
    def model(self) -> tuple[str, str | None]:
        """The draft model's folder, or its name and revision."""
        revision = self.arguments.get("revision")
        return str(self.arguments["model_path"]), None if revision is None else str(revision)

    def flags(self) -> list[str]:
        return [f"--{name}={_written(value)}" for name, value in dataclasses.asdict(self).items()]

    @classmethod
    def parse(cls, parser: argparse.ArgumentParser) -> DraftSettings:
        for field in dataclasses.fields(cls):
            parser.add_argument(f"--{field.name}", type=_PARSERS[str(field.type)], required=True)
        return cls(**vars(parser.parse_args()))


def _written(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def draft_device(options: Options, view: ServerArgs, method: Method, replica: int = 0) -> str:
    """The device that a replica's draft model runs on. Raises ValueError for a device that this host cannot have, and for one that
    nobody has named and others use.

    view: the resolved arguments.
    """
    kind, device = view.device, options.draft_device or method.draft_device
    if not device:
        return "cpu" if kind == "cpu" else _next_device(view, method, replica)
    if device == "cpu":
        return device
    named, _, index = device.partition(":")
    if named != kind:
        raise ValueError(f"specstore option draft_device: {device} with a target on {kind}")
    if (count := GPUS.count()) and int(index or 0) >= count:
        raise ValueError(f"specstore option draft_device: {device}, but this process sees {count} GPUs")
    return f"{kind}:{index or 0}"


def refuse_draft_devices(options: Options, view: ServerArgs, method: Method) -> None:
    """Raises what `draft_device` does for any replica, before a model is loaded."""
    for replica in range(view.dp_size):
        draft_device(options, view, method, replica)


def _next_device(view: ServerArgs, method: Method, replica: int) -> str:
    """The first after those of all targets, the next one for the next replica."""
    index = view.base_gpu_id + view.dp_size * _span(view) + replica
    count = GPUS.count()
    reason = f"this process sees {count}" if index >= count else _why_in_use(view, index)
    if count and reason:
        raise ValueError(
            f"{method.name}: no GPU is left for the draft model, {reason}: give the server one more, or set "
            f"--specstore-draft-device to the draft model's, to {view.device}:{view.base_gpu_id}, where it drafts while nothing is "
            "verified, or to cpu"
        )
    return f"{view.device}:{index}"


def _why_in_use(view: ServerArgs, index: int) -> str:
    """Why the GPU may be another's, "" if nobody uses it."""
    name = f"{view.device}:{index}"
    try:
        used = GPUS.bytes_in_use(index)
    except Exception as error:  # torch's, or NVML's, which torch does not name
        return f"{name} may be another's, which this process cannot find out ({error})"
    return f"{name} is in use ({used / 2**30:.1f} GiB)" if used >= UNUSED_BYTES else ""


def draft_cores(device: str, view: ServerArgs, replica: int = 0) -> list[int]:
    """The cores of a draft model on the CPU beside an accelerator: half of those that the server may use, of which every replica's has
    a part. The engine's threads keep all of them. None where nothing is pinned."""
    if device != "cpu" or view.device == "cpu":
        return []
    cores = sorted(os.sched_getaffinity(0))
    free = cores[len(cores) // 2 :]
    each = max(1, len(free) // view.dp_size)
    begin = replica * each % len(free)
    return free[begin : begin + each]


def _span(view: ServerArgs) -> int:
    """Devices from one replica's first to the next one's."""
    return view.tp_size * view.gpu_id_step


def _devices_of_target(view: ServerArgs, replica: int) -> list[str]:
    """The devices of a replica's target. Empty on a CPU: there the operating system gives both processes their share."""
    if view.device == "cpu":
        return []
    first = view.base_gpu_id + replica * _span(view)
    return [f"{view.device}:{first + rank * view.gpu_id_step}" for rank in range(view.tp_size)]


def draft_settings(
    view: ServerArgs,
    given: Mapping[str, object],
    options: Options,
    method: Method,
    namespace: Namespace,
    context_length: int,
    vocabulary: int,
    replica: int = 0,
) -> DraftSettings:
    """The settings of the draft process of a server's replica (`--dp-size`).

    view: the server's resolved arguments.
    given: the arguments that the operator has given.
    context_length, vocabulary: the target's.
    """
    device = draft_device(options, view, method, replica)
    same_kind = device.partition(":")[0] == view.device
    return DraftSettings(
        method=method.name,
        # SGLang may have brought the model to another folder.
        arguments=draft_arguments(given, same_kind) | {"model_path": str(view.speculative_draft_model_path)},
        quantization=followed_quantization(given, same_kind),
        tokenizer="" if view.skip_tokenizer_init else str(view.tokenizer_path),
        tokenizer_revision=view.revision or "",
        device=device,
        tokens=options.draft_tokens,
        sessions=view.max_running_requests,
        rows=options.draft_rows,
        lookahead=options.draft_lookahead,
        namespace=namespace.model,
        fingerprint=namespace.tokenizer,
        context_length=context_length,
        vocabulary=vocabulary,
        serial=device in _devices_of_target(view, replica),
        cores=",".join(map(str, draft_cores(device, view, replica))),
    )
