"""The live tier: what closed sessions have written, kept as a log-structured merge tree.

An output is appended to the *fresh text*, an index that takes tokens one by one, and the next query finds it there. A
full fresh text is *sealed*: on a background thread it becomes a segment. Neighbouring segments of similar size are
merged into one, so that a token is sorted again only once for each size class. The oldest segments are evicted when the
tier holds more than its limit.

Read the modules in this order:

- `view`: the immutable value that a query sees, and the changes that can be made to it;
- `epochs`: how many updates of the model's weights old a text is;
- `store`: what the tier asks of a disk, and the store of a tier without one;
- `durable_view`: the current view, shown to queries and saved for a restart;
- `fresh_writer`: takes outputs, logs them, appends them to the fresh text;
- `merge_policy`: which segments to merge;
- `compactor`: seals, merges and evicts in the background;
- `tier`: the class that the engine uses.

Nothing is dropped before its replacement is in the view, so a merge that fails loses nothing. A document is in its
fresh text's log before the next query finds it, and a segment is in the store before a view has it.
"""
