"""Facts of our own: what the programs in files/ say about a host."""
