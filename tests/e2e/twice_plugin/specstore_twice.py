"""Runs each verification twice, without the early exit and with it, and writes into a file whether the logits are the same bits. Put
on the path of a server under test only; SGLang finds it as a plugin."""

import os

FILE = "SPECSTORE_TWICE_FILE"
RUNNER = "sglang.srt.managers.tp_worker.TpModelWorker.__init__"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(RUNNER, lambda made, worker, *_, **__: watch(worker.model_runner), HookType.AFTER)


def watch(runner) -> None:
    import torch

    stock = runner.forward

    def twice(batch, *arguments, **named):
        if not batch.forward_mode.is_target_verify():
            return stock(batch, *arguments, **named)
        with without_tap(runner.model.model.layers):
            before = stock(batch, *arguments, **named).logits_output.next_token_logits.clone()
        result = stock(batch, *arguments, **named)
        same = torch.equal(before, result.logits_output.next_token_logits)
        with open(os.environ[FILE], "a") as file:
            file.write(f"{'same' if same else 'other'} {len(before)}\n")
        return result

    runner.forward = twice


class without_tap:  # noqa: N801 - a context
    """Takes away what was put around the layers' own forward."""

    def __init__(self, layers):
        self._layers = [layer for layer in layers if "forward" in vars(layer)]

    def __enter__(self):
        assert self._layers, "no layer is tapped"
        self._taps = [vars(layer).pop("forward") for layer in self._layers]

    def __exit__(self, *error):
        for layer, tap in zip(self._layers, self._taps, strict=True):
            layer.forward = tap
