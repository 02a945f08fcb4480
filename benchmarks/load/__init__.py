"""What one datastore service carries: a real service, and processes that act as the decode loops of many engines.

`texts` makes what the sessions say, `engine` is one simulated engine with its Draft stream, `clients` the processes that hold
them, `watch` looks at the service and the machine meanwhile, `levels` makes figures of a measured time and finds the limit.
"""
