"""Gradient-flow diagnostics for PyTorch."""
