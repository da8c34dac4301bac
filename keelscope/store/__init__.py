"""The run file: one HDF5 file per run, written while training goes on and readable by every HDF5 tool.

Each group of statistics is one HDF5 group with its own ``step`` and ``site`` coordinates; each statistic is one float64
dataset ``[step, site, ...]`` whose axes are attached dimension scales, so xarray, netCDF tools and h5dump show labelled
arrays without keelscope. Labels (module paths) are strings in coordinates, never HDF5 names. NaN is the fill value, and
``observed`` in each group tells a site that was not seen (0) from a NaN that was computed (1). While the run is being
written the file is in SWMR mode: readers in other processes see every committed row, and a killed process leaves a file
that opens. `docs/file-format.md` describes every object.

`writer.RunWriter` and `memory.MemoryWriter` take the same `schema.RunLayout` and `schema.Row`s; `reader.open_run` and
`memory.MemoryWriter.run` give the same `reader.Run`. Nothing here imports torch or the rest of keelscope.
"""
