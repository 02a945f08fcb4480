"""A model's own head (EAGLE, EAGLE-3, MTP, a small model of SGLang's STANDALONE) and retrieval beside it.

Read the modules in this order:

- `own`: the head as SGLang runs it: drafts, and follows what the target accepted;
- `source`: the head's tree and the datastore's as one, and whether a step waits for the head;
- `relay`: tokens that the scheduler has not handed to the requests yet;
- `worker`: a decode step with both.

An EAGLE-3 head is made by `sglang_patches/training`.

What the operator may combine is in `sglang_patches/beside_head.py`.
"""
