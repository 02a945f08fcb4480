"""Trains what drafts for a model, on the model's own answers. The model stays as it is.

`python -m sglang_patches.training` is the program.

- `answers`: texts, and what the model computes at their tokens;
- `exits`: early exits of the model, for MIRROR;
- `eagle3`, `heads`: an EAGLE-3 head, and how one is made.
"""

EXIT_EPOCHS, HEAD_EPOCHS = 4, 10  # how often all texts are read, if nothing else is said
