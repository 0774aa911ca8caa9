"""What the pages know of a run, as records: read from its files, without a model."""
