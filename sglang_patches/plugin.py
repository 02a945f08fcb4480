"""Entry point `sglang.srt.plugins`: called once in every SGLang process, before anything is served."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from sglang_patches.methods.registry import Method

logger = logging.getLogger(__name__)

_registered = False


def register() -> None:
    """Registers the CPU support (on a machine without an accelerator), the flags and the algorithms. Idempotent."""
    global _registered
    if _registered:
        return
    _registered = True
    try:
        _install_cpu_support()
        _register_flags()
        _register_algorithms()
    except (ImportError, AttributeError) as error:
        from sglang_patches.host.symbols import drift_message

        if drift := drift_message():
            raise RuntimeError(drift) from error
        raise


def _install_cpu_support() -> None:
    from sglang.srt.utils import is_cpu

    if is_cpu():
        from sglang_patches.cpu import install

        install()


def _register_flags() -> None:
    from sglang.srt.plugins.hook_registry import HookType

    from sglang_patches.host import hooks
    from sglang_patches.host.versions import host

    def after_add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
        from sglang_patches.options import add_flags

        add_flags(parser)

    def before_from_cli_args(cls: type, args: argparse.Namespace) -> None:
        from sglang_patches.options import check_options, export_flags

        given = export_flags(args)
        try:
            check_options()
        except (ValueError, OSError) as error:
            print(f"specstore: {error}", file=sys.stderr)
            raise SystemExit(2) from None  # as argparse ends for a flag of its own
        if given and not _is_served(args.speculative_algorithm):
            flags = ", ".join(given)
            logger.warning("specstore: %s: no effect without a --speculative-algorithm of specstore", flags)

    server_args = "sglang.srt.server_args.ServerArgs."
    hooks.register({server_args + "add_cli_args": after_add_cli_args}, HookType.AFTER)
    hooks.register(
        {server_args + "from_cli_args": before_from_cli_args} | host.RESOLUTION_HOOKS, HookType.BEFORE
    )


def _is_served(algorithm: str | None) -> bool:
    """Whether it is made of a Method, which another plugin may have registered, or of a head that retrieval stands beside."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_patches.algorithm import TreeAlgorithm
    from sglang_patches.options import load_options

    if load_options().beside_head == "on":  # is refused where it cannot work
        return algorithm is not None
    try:
        return isinstance(SpeculativeAlgorithm.from_string(algorithm), TreeAlgorithm)
    except ValueError:  # SGLang ends for a name that nobody has
        return False


def _register_algorithms() -> None:
    from sglang_patches.methods.registry import EARLIER_NAMES, METHODS

    for method in METHODS.values():
        register_method(method)
    for earlier, name in EARLIER_NAMES.items():
        register_method(METHODS[name], earlier)
    _register_heads()


def _register_heads() -> None:
    from sglang_patches import beside_head

    def worker(method: Method) -> type:
        from sglang_patches.head.worker import HeadWorker

        _prepare_decoding()
        return HeadWorker.of(method)

    beside_head.register(worker)


def register_method(method: Method, name: str | None = None) -> None:
    """Makes the method a value of SGLang's `--speculative-algorithm`. For methods of other plugins too, after `register`.

    name: the value, if it is not the method's name."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_patches.algorithm import TreeAlgorithm
    from sglang_patches.host.versions import host
    from sglang_patches.methods.registry import current_name

    name = name or method.name

    @SpeculativeAlgorithm.register(name, supports_overlap=True, spec_class=TreeAlgorithm.of(method))
    def worker(server_args: ServerArgs) -> type:
        current_name(name)
        if server_args.disaggregation_mode == "prefill":
            from sglang_patches.disaggregation.prefill_worker import PrefillWorker
            from sglang_patches.start.room import make_room_for_trees

            make_room_for_trees()
            return host.worker_class(PrefillWorker)
        from sglang_patches.step.decode import DecodeWorker

        _prepare_decoding()
        return host.worker_class(DecodeWorker.of(method))


def _prepare_decoding() -> None:
    """Makes the scheduler's process ready for a worker that verifies trees."""
    from sglang_patches import reports
    from sglang_patches.start.room import make_room_for_trees
    from sglang_patches.step.ends import register_ends
    from sglang_patches.step.epoch import register_updates

    make_room_for_trees()
    register_ends()
    register_updates()
    reports.register_in_scheduler()
