"""Recorded answers replayed through every drafting method: what each would get accepted, without a model in the loop.

Greedy decoding's output does not depend on the draft, so a recorded answer decides what any draft gets accepted. `method`
is the interface, `methods` has ours and names all, `retrieval` and `peers` the others', `experiments` the questions;
`tables` shows what came out, benchmarks.report draws it.
"""
