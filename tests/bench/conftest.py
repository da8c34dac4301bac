"""Benchmarks are run by `make bench`, and are no tests."""

collect_ignore_glob = ["*.py"]
