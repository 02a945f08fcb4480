"""The draft side hears what is verified while the target verifies it: before a launch that blocks, after one that does not."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from sglang_patches.metrics import PhaseClock  # noqa: E402
from sglang_patches.step.base import TreeWorker  # noqa: E402


class StoppedError(Exception):
    """The step need not go on."""


class Worker(TreeWorker):
    def __init__(self, launch_blocks: bool) -> None:
        self.device, self.launch_blocks, self.happened = "cpu", launch_blocks, []
        self._target_worker = SimpleNamespace(forward_batch_generation=self.forward)
        self.verifier = SimpleNamespace(verify=self.verify)

    def draft_batch(self, batch, step):
        raise NotImplementedError

    def observe_prefill(self, batch):
        raise NotImplementedError

    def _prepare_verify(self, batch, layout):
        pass

    def forward(self, batch, is_verify):
        self.happened.append("forward")
        return SimpleNamespace(logits_output=None)

    def verification_launched(self, batch, drafted):
        self.happened.append("told")

    def verify(self, *_):
        raise StoppedError


@pytest.mark.parametrize(
    ("launch_blocks", "order"), [(True, ["told", "forward"]), (False, ["forward", "told"])]
)
def test_the_draft_side_is_told_while_the_target_verifies(launch_blocks, order):
    worker, layout = Worker(launch_blocks), SimpleNamespace(mask=np.ones((1, 2, 2), bool))
    batch = SimpleNamespace(reqs=[], has_grammar=False, spec_info=None)
    step = SimpleNamespace(pending=[])
    with pytest.raises(StoppedError):
        worker._verify(batch, None, layout, step, PhaseClock(), None)
    assert worker.happened == order
