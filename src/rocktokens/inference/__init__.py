"""Generic statistics: the bootstrap, paired and crossed designs, multiplicity, power. They know nothing of tokens."""
