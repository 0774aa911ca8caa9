"""Student completions: how they are sampled, encoded and stored."""
