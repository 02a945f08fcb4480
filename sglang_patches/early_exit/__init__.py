"""An early exit of the target: what it expects after half of its layers (MIRROR, section 3.1).

`python -m sglang_patches.training exits` trains one.
"""
