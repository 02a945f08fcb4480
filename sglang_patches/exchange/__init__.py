"""What the worker and the draft side say to each other, and what both must understand alike. It imports nothing of the plugin.

Read the modules in this order:

- `messages`: what each tells the other;
- `trie`: what may follow a session's last committed token, as both keep it;
- `text`: a request's tokens in one growing array;
- `wire`: messages as bytes;
- `connection`: the draft process's end of the channel.
"""
