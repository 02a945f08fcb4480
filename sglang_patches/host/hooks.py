"""Registers our hooks on SGLang's functions and makes sure that none is left out.

SGLang applies all hooks of a function at once, and only once. A hook that is registered after that, because another
plugin's hook on the same function is in place, is left out silently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

if TYPE_CHECKING:
    from sglang.srt.plugins.hook_registry import HookSource

logger = logging.getLogger(__name__)

ByKind = Mapping[
    HookType, Mapping[str, Callable]
]  # the functions to call, by the dotted path of the hooked function
_registered: set[str] = set()  # targets
_left_out: dict[str, str] = {}  # target -> why its hook is not in place


def register(hooks: Mapping[str, Callable], kind: HookType) -> None:
    """Registers hooks with SGLang. Logs an error for a hook that comes too late.

    hooks: the functions to call, by the dotted path of the hooked function.
    """
    for target, hook in hooks.items():
        if reason := _too_late(target):
            _left_out[target] = reason
            logger.error(reason)
        else:
            _registered.add(target)
            HookRegistry.register(target, hook, kind)


def apply(by_kind: ByKind) -> None:
    """Hooks SGLang now, once however often it is called. For the process that has imported the hooked modules already; elsewhere the
    hooks would import them. Raises RuntimeError where another plugin's hook keeps one out."""
    for kind, hooks in by_kind.items():
        register(hooks, kind)
    refuse_if_left_out()
    HookRegistry.apply_hooks()


def targets(*hooked: ByKind) -> set[str]:
    """The dotted paths of the hooked functions."""
    return {target for by_kind in hooked for hooks in by_kind.values() for target in hooks}


def refuse_if_left_out(coming: Iterable[str] = ()) -> None:
    """Raises RuntimeError if a hook was left out, or would be. It names the first target that can no longer be hooked, and the plugin
    that has hooked it.

    coming: targets that this process, or a process that it starts, hooks later.
    """
    for reason in (*_left_out.values(), *map(_too_late, coming)):
        if reason:
            raise RuntimeError(reason)


def _too_late(target: str) -> str | None:
    """The reason why a hook on the target would be left out, None if it would not."""
    if target in _registered or target not in HookRegistry._patched:
        return None
    others = ", ".join(sorted({_whose(hook, source) for _, hook, source in HookRegistry._hooks[target]}))
    return (
        f"specstore: cannot hook {target}: SGLang has applied that function's hooks already, for {others}; "
        "load one of the two plugins (SGLANG_PLUGINS lists those to load)"
    )


def _whose(hook: Callable, source: HookSource | None) -> str:
    return repr(hook) if source is None else f"plugin {source.plugin_name} of {source.dist_name}"
