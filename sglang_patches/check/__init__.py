"""What an operator runs before trusting a machine: the host-symbol table, and the whole path on a device."""
