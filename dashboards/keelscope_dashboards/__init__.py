"""The keelscope dashboard."""
