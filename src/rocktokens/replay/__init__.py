"""Replay: one probe set of rollouts, scored by every checkpoint (METHOD 3)."""
