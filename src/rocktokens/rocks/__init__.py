"""Rocks: find them in traces, say how sure that is, and match controls to them. Runs without a model."""
