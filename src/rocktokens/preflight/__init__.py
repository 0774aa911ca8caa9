"""What ``rocktokens check`` looks at before a run starts (METHOD 9)."""
