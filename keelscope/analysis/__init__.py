"""Numbers over depth and steps: arrays in, arrays out, no files and no figures.

`profile` reduces one quantity over depth to slope, span, knee and flatness; `dynamics` looks along steps; `compare`
puts several profiles on one axis; `paths` follows the shortcuts of a residual stream and `attribution` splits the
change of its gradient by cause. `keelscope.diagnosis` judges what they return.
"""
