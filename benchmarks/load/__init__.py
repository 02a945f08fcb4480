"""What one datastore service carries: a real service, and processes that act as the decode loops of many engines.

`engine` is one simulated engine with its Draft stream and what its sessions say, `clients` the processes that hold
them, `watch` looks at the service and the machine meanwhile, `levels` makes figures of a measured time and finds the limit.
"""
