"""Several services, one memory: what one publishes, the others take into their live tiers. The way is a stream of a Valkey or Redis server.

Read the modules in this order:

- `address`: the server, and how it is reached;
- `keys`: the names of a namespace's keys there;
- `messages`: what a stream says, and what of it is believed;
- `lease`: keeps a copy of a data directory from speaking under the name of the original;
- `places`: places in a stream, and the messages after one;
- `forgetting`: takes a subject's text out of a tenant's streams, and has all services forget it;
- `stream`: one namespace's stream: read, then written;
- `thread`: the one thread that does all of this, beside the drafting;
- `metrics`: what it counts.

Nothing is queued: what is to be sent is read from the live tier, by its numbers. How far the others were told stands on the server, written
in one transaction with the messages. How far this service has read stands in its data directory. So each side may lose what it did last:
a message that is read again is known by its origin and number.
"""
