"""Statistics over traces: sums per type, rocks, categories. Everything here runs without a model."""
