"""Runs each kernel check on the CPU, as it is and with a fault in its kernel; prints what they find as JSON. A process of its
own, because SGLang decides at import whether it serves on a CPU."""

import json

from sglang_patches.check import kernels

KERNELS = {
    "kernel: walk down the tree": "verify_tree_greedy_func",
    "kernel: KV slots of a tree": "assign_extend_cache_locs_func",
    "kernel: move of accepted rows": "move_accept_tokens_to_target_kvcache",
    "tree masks": "full_mask",
    "shared noise": "exponentials",
}


def _with_fault(kernel: str):
    right = getattr(kernels, kernel)

    def faulty(*arguments, **named):
        found = right(*arguments, **named)
        if kernel == "verify_tree_greedy_func":
            found[1][:, 1:] = -1  # never accepts a draft
        elif kernel == "move_accept_tokens_to_target_kvcache":
            arguments[3].values.fill_(0)
        else:
            found = found.roll(1)
        return found

    return right, faulty


def main() -> None:
    found = {}
    for name, check in kernels.CHECKS.items():
        right, faulty = _with_fault(KERNELS[name])
        found[name] = [check("cpu")]
        setattr(kernels, KERNELS[name], faulty)
        found[name].append(check("cpu"))
        setattr(kernels, KERNELS[name], right)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
