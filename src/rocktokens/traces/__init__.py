"""Traces: one row per response token and checkpoint, in immutable Parquet parts that a manifest lists."""
