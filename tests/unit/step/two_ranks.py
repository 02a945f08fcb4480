"""`SGLANG_USE_CPU_ENGINE=1 python -m tests.unit.step.two_ranks FOLDER`: recorded sessions put through two tensor-parallel ranks.

Each rank is a process with a worker of its own; they exchange over gloo, in a group that SGLang makes. Each writes
FOLDER/rank-N.json: the lines of the case, what its metrics of decode steps have counted, what it has of a tensor that differs between
ranks, and what an early exit expects with the head divided and whole.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import torch
from prometheus_client import REGISTRY
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context, get_parallel

from sglang_patches.early_exit.file import Adapter
from sglang_patches.early_exit.tap import EarlyExit
from sglang_patches.launch.processes import free_port
from sglang_patches.verification.shared_noise import NO_NOISE
from sglang_patches.verification.verifier import from_first_rank
from tests.unit.step.recorded_sessions import play

RANKS, CASE = 2, "lagging"


def group_of(rank: int, port: int) -> GroupCoordinator:
    place = f"tcp://127.0.0.1:{port}"
    with get_context().override_server_args(device="cpu", page_size=1):
        parallel_state.init_distributed_environment(RANKS, rank, place, rank, backend="gloo")
        return parallel_state.init_model_parallel_group([list(range(RANKS))], rank, "gloo", group_name="tp")


def ranks_of(group: GroupCoordinator, rank: int) -> AbstractContextManager[object]:
    sizes = {"tp_size": RANKS, "attn_tp_size": RANKS, "moe_tp_size": RANKS}
    places = {"tp_rank": rank, "attn_tp_rank": rank, "moe_tp_rank": rank}
    return get_parallel().override(tp_group=group, **sizes, **places)


def run(rank: int, port: int, folder: Path) -> None:
    load_plugins()
    group = group_of(rank, port)
    told = {"lines": play(CASE, ranks_of(group, rank)), "steps": counted("step_seconds_count")}
    told["seconds"] = counted("phase_seconds_total")
    with ranks_of(group, rank):
        (tensor,) = from_first_rank((torch.tensor([rank]),))
        told |= {"of_first": tensor.tolist(), "divided": expected_by_exit(head().chunk(RANKS)[rank])}
    with get_parallel().override(tp_group=SimpleNamespace(world_size=1)):
        told["whole"] = expected_by_exit(head())
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))


def head() -> torch.Tensor:
    return torch.randn(RANKS * 32, 16, generator=torch.Generator().manual_seed(0))


def expected_by_exit(head: torch.Tensor) -> list[list[int]]:
    """Of a few states, with the adapter that each rank has."""
    torch.manual_seed(1)
    adapter, states = Adapter(16), torch.randn(5, 16)
    processor = SimpleNamespace(_compute_lm_head=lambda states, head: states @ head.T)
    model = SimpleNamespace(lm_head=head, logits_processor=processor)
    config = SimpleNamespace(vocab_size=50)  # the rest is padding
    runner = SimpleNamespace(model=model, model_config=config, device="cpu", dtype=torch.float32)
    seeds, positions = torch.full((5,), NO_NOISE), torch.arange(5)
    tokens, _ = EarlyExit(runner, adapter).expects(states, torch.ones(5), seeds, positions, 8)
    return tokens.tolist()


def counted(name: str) -> float:
    """Of the metric, whatever its labels."""
    samples = (sample for family in REGISTRY.collect() for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == f"specstore_decode_{name}")


def main() -> None:
    """The last rank is this process; the others are forked before it has threads."""
    folder, port = Path(sys.argv[1]), free_port()
    others = 0
    for rank in range(RANKS - 1):
        if os.fork() == 0:
            run(rank, port, folder)
            return
        others += 1
    run(RANKS - 1, port, folder)
    for _ in range(others):
        assert os.wait()[1] == 0


if __name__ == "__main__":
    main()
