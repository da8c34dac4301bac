"""Run files for other programs: tables (CSV, Parquet, JSON), netCDF, and the scalars of TensorBoard and W&B.

`selection` says what is exported; each format is a `Format` in `formats`, made by one function of `tables`, `netcdf` or
`scalars`. ``keelscope export`` is a thin layer over `export_run`.
"""

from __future__ import annotations

from keelscope.export.formats import FORMATS, Exported, Format, export_run
from keelscope.export.selection import Selection

__all__ = ["FORMATS", "Exported", "Format", "Selection", "export_run"]
