"""The epoch of the weights: each of SGLang's updates begins one, however many calls it takes."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from sglang.srt.managers.scheduler_components import weight_updater  # noqa: E402

from sglang_patches.host.versions import host  # noqa: E402
from sglang_patches.step import epoch  # noqa: E402
from sglang_patches.step.epoch import Epoch, register_updates  # noqa: E402

UPDATER = weight_updater.SchedulerWeightUpdaterManager


@pytest.fixture
def told(monkeypatch) -> Epoch:
    """What this process's hooks tell."""
    register_updates()
    register_updates()
    monkeypatch.setattr(epoch, "EPOCH", Epoch())
    return epoch.EPOCH


def test_an_update_of_several_calls_is_one_epoch():
    weights = Epoch()
    assert weights.now() == 0
    for _ in range(5):
        weights.weights_changed(None)
    assert [weights.now(), weights.now()] == [1, 1]
    weights.weights_changed(None)
    assert weights.now() == 2


@pytest.mark.parametrize(
    "versions, epochs",
    [
        (["12", "13", "20"], [12, 13, 20]),
        ([None, "3", "3"], [1, 3, 4]),  # the trainer has begun anew, or numbers no more
        (["default", "v2", ""], [1, 2, 3]),
        (["9" * 19, "-4", "1.5"], [1, 2, 3]),
        (["9" * 18], [10**18 - 1]),
    ],
)
def test_a_trainer_s_numbers_are_its_epochs(versions, epochs):
    weights, found = Epoch(), []
    for version in versions:
        weights.weights_changed(version)
        found.append(weights.now())
    assert found == epochs


@pytest.fixture
def updater(monkeypatch) -> UPDATER:
    """SGLang's, whose runner takes all weights."""
    monkeypatch.setattr(weight_updater.torch.distributed, "barrier", lambda group: None)
    loaded = lambda *_, **__: (True, "")  # noqa: E731
    names = ("disk", "ipc", "tensor")
    runner = SimpleNamespace(
        weight_updater=SimpleNamespace(
            **{f"update_weights_from_{name}": loaded for name in names},
            load_weights_from_distributed=loaded,
            receive_weights_from_distributed=lambda **_: [],
            begin_weight_update=lambda: None,
            end_weight_update=lambda **_: None,
        )
    )
    made = object.__new__(UPDATER)
    made.tp_worker = SimpleNamespace(
        weight_update_runners=lambda: [("target", runner)],
        deserialize_own_rank=lambda tensors: [],
        model_runner=runner,
    )
    made.draft_worker = made.metrics_collector = made.tp_cpu_group = made._session = None
    made.scheduler = SimpleNamespace(record_weight_version_change=lambda new_version: None)
    made.flush_cache = lambda empty_cache: True
    return made


@pytest.mark.skipif(len(host.WEIGHT_UPDATES) < 2, reason="this SGLang has no update sessions")
@pytest.mark.parametrize("way", ["disk", "ipc", "tensor", "distributed", "memory"])
def test_every_way_to_change_weights_begins_an_epoch(way, told, updater):
    named = {"weight_version": "6", "flush_cache": True, "torch_empty_cache": False, "selector": "all"}
    request = SimpleNamespace(
        model_path="m", load_format=None, recapture_cuda_graph=False, serialized_named_tensors=[], names=[],
        dtypes=[], shapes=[], group_name="g", **named,
    )  # fmt: skip
    if way in ("tensor", "distributed", "memory"):
        assert updater.begin_weight_update(request).success
    assert told.now() == 0
    if way == "memory":  # the trainer has written them into this process itself
        assert updater.end_weight_update(request).success
        assert told.now() == 6
        return
    done = getattr(updater, f"update_weights_from_{way}")(request)
    assert done.success, done.message
    assert told.now() == 6
