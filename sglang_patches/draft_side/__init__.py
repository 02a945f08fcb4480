"""The draft side: it follows the target's sessions, guesses how their verifications end, and drafts from there.

It is state with messages in and answers out. It runs in the draft process, and in the worker's own in tests and simulations.

Read the modules in this order:

- `draft`: what it knows of one session;
- `seams`: what it asks of others: a draft model, and a method's predictor, drafter, retriever and choice of rows;
- `side`: the rounds of its work.
"""
