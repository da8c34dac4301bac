"""Trainers people use: each integration is a few lines over `keelscope.watch`.

`huggingface` and `lightning` are callbacks, `accelerate` is a function. Importing one imports none of these libraries;
the first callback does.
"""
