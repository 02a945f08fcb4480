"""The sources of drafts, in the worker's process.

Read the modules in this order:

- `datastore`: what the datastore has been told of each request, and its trees;
- `seams`: what makes a tree where no outcome was foreseen, and the way to the draft side;
- `union`: one tree of several;
- `cache`: the speculation cache, which the draft side's growth fills;
- `speculation`: the draft side as the worker sees it: what it is told, and what is looked up;
- `channel`: the channel to a draft process, with `peer` (one run of it).
"""
