"""The built-in probes."""
