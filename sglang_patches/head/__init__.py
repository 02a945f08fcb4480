"""A model's own head (EAGLE, EAGLE-3, MTP, a small model of SGLang's STANDALONE) and retrieval beside it.

Read the modules in this order:

- `own`: the head as SGLang runs it: drafts, and follows what the target accepted;
- `source`: the head's tree and the datastore's as one; `worth`: whether a step waits for the head;
- `relay`: tokens that the scheduler has not handed to the requests yet;
- `worker`: a decode step with both;
- `network`, `training`: an EAGLE-3 head, and how one is made (`python -m sglang_patches.head`).

What the operator may combine is in `sglang_patches/beside_head.py`.
"""
