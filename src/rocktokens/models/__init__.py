"""Models by name: loading, their LM heads, and fingerprints that say whether two of them belong together."""
