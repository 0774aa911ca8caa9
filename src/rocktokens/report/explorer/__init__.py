"""The explorer: a local, read-only web server over runs."""
