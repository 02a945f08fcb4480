"""A deliberate fault for the distribution test: often a drafted child is accepted although the target drew
another token. Put on the path of a server under test only; SGLang finds it as a plugin."""

import random

ACCEPT_ANYWAY = 0.8


def register() -> None:
    from sglang_patches.verification.verifier import HostTrees

    exact = HostTrees.child_with_token
    draw = random.Random(1)

    def biased(self: HostTrees, request: int, node: int, token: int) -> int:
        child = next(iter(self.children(request, node)), -1)
        if child != -1 and draw.random() < ACCEPT_ANYWAY:
            return child
        return exact(self, request, node, token)

    HostTrees.child_with_token = biased
