"""A decode step, as SGLang's scheduler asks for it.

Read the modules in this order:

- `base`: tree, verification, commit; `decode`: what all methods do around it;
- `length`, `acceptance`: how many rows a step verifies, and how often drafted nodes are accepted, learned from outcomes;
- `widths`: which widths steps may have, and CUDA graphs of several;
- `assembly`: what a worker is made of; `sources`: where a step's drafts come from;
- `exit_reader`: what an early exit sees of a step;
- `courier`: brings an accelerator's outcomes to the draft side;
- `ends`: when a request ends.
"""
