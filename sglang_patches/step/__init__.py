"""A decode step, as SGLang's scheduler asks for it.

Read the modules in this order:

- `base`: tree, verification, commit; `decode`: what all methods do around it;
- `length`, `acceptance`: how many rows a step verifies, and how often drafted nodes are accepted;
- `width_graphs`: CUDA graphs of several widths;
- `courier`: brings an accelerator's outcomes to the draft side;
- `finish_hooks`, `first_end`: when a request ends;
- `start_draft`: starts the draft process.
"""
