"""A model's own head (EAGLE, EAGLE-3, MTP, a small model of SGLang's STANDALONE) and retrieval beside it.

Read the modules in this order:

- `own`: the head as SGLang runs it: drafts, and follows what the target accepted;
- `source`: the head's tree and the datastore's as one;
- `relay`: tokens that the scheduler has not handed to the requests yet;
- `worker`: a decode step with both;
- `algorithm`: what the operator may combine.
"""
