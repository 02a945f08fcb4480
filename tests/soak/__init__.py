"""The datastore under load, kills and stops for minutes, with every answer checked: `python -m tests.soak`.

Client processes act as workers: each thread has a Draft stream with several sessions, and another thread makes admin calls.
Meanwhile the service is killed, stopped, let go on and restarted at random times. What is checked:

- each reply answers its own message, in order, with the status and the `known` that the worker can work out;
- each draft keeps its budget and is made of the tenant's own text: tenants have disjoint token ids, and two tokens follow
  each other in a draft only where they do in a text that was sent;
- an output whose closing was acknowledged is drafted from where nothing else continues the context, across kills, until a
  flush, a restored snapshot or a drop takes it, and then no more;
- at the end no stream and no session is left, memory is bounded, and every segment file on the disk is whole.

`texts` makes what is written, `ledger` knows what must be remembered, `tenant` holds both with what was found wrong, `worker` and
`operator` talk to the service, `client` is a client process, `service` the process under test, `run` the whole.
"""
