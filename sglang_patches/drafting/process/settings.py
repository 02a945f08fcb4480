"""What a draft process is told at its start, as flags of its command line."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datastore_service.protocol.types import Namespace
from sglang_patches.options import Options

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_PARSERS: dict[str, Callable[[str], object]] = {"str": str, "int": int, "bool": lambda text: text == "True"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """method: its name in the registry. model_path, dtype, trust_remote_code: as SGLang's flags of those names. tokenizer: folder of
    the target's, "" where requests bring token ids alone. device: `cpu`, `cuda` or `cuda:N`. tokens: slots of the draft model's KV
    cache. sessions: most that are drafted for at once. rows: of a draft forward, and outcomes guessed at once. lookahead: tokens
    drafted after each. namespace, fingerprint: model and tokenizer of the datastore's namespace. context_length, vocabulary: the
    target's. serial: whether the target has the same device. All other options are read as the worker reads them."""

    method: str
    model_path: str
    tokenizer: str
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
    dtype: str
    trust_remote_code: bool

    def flags(self) -> list[str]:
        return [f"--{name}={value}" for name, value in dataclasses.asdict(self).items()]

    @classmethod
    def parse(cls, parser: argparse.ArgumentParser) -> DraftSettings:
        for field in dataclasses.fields(cls):
            parser.add_argument(f"--{field.name}", type=_PARSERS[str(field.type)], required=True)
        return cls(**vars(parser.parse_args()))


def draft_device(options: Options, view: ServerArgs) -> str:
    """Where the draft model runs. view: the resolved arguments. Raises ValueError for a device of another kind than the target's."""
    kind = view.device
    if not options.draft_device:
        return "cpu" if kind == "cpu" else f"{kind}:{view.base_gpu_id + view.tp_size}"
    if options.draft_device.partition(":")[0] != kind:
        raise ValueError(
            f"specstore option draft_device: {options.draft_device} with a target on {kind} is not supported yet"
        )
    return options.draft_device


def _devices_of_target(view: ServerArgs) -> list[str]:
    """None on a CPU: there the operating system gives both processes their share."""
    if view.device == "cpu":
        return []
    return [f"{view.device}:{view.base_gpu_id + rank}" for rank in range(view.tp_size)]


def draft_settings(
    view: ServerArgs,
    options: Options,
    method: str,
    namespace: Namespace,
    context_length: int,
    vocabulary: int,
) -> DraftSettings:
    """Of a server. view: its resolved arguments. context_length, vocabulary: the target's."""
    return DraftSettings(
        method=method,
        model_path=str(view.speculative_draft_model_path),
        tokenizer="" if view.skip_tokenizer_init else str(view.tokenizer_path),
        device=draft_device(options, view),
        tokens=options.draft_tokens,
        sessions=view.max_running_requests,
        rows=options.draft_rows,
        lookahead=options.draft_lookahead,
        namespace=namespace.model,
        fingerprint=namespace.tokenizer,
        context_length=context_length,
        vocabulary=vocabulary,
        serial=draft_device(options, view) in _devices_of_target(view),
        dtype=view.dtype,
        trust_remote_code=view.trust_remote_code,
    )
