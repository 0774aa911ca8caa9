"""Generic statistics: bootstrap, paired and crossed designs, proportions, multiplicity, power; they know no tokens."""
