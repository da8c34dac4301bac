"""Every error keelscope raises, so that a caller can catch one family or the builtin it stands for.

```
KeelscopeError
├── UsageError (ValueError)              an argument that cannot be used as given
│   ├── UnknownNameError (LookupError)   a probe, scheme, statistic or site that does not exist
│   └── InputSpecError                   a batch description that does not parse
├── TargetError (LookupError)            a report target that does not lead to a model
│   └── FactoryError                     the target was found, but building the model failed
├── ModelError (RuntimeError)            a model that cannot be observed as asked
│   ├── BatchError                       the model rejects the batch
│   ├── LossError                        the loss is not one differentiable number
│   └── NothingToObserveError            no parameter requires a gradient
├── HealthError (AssertionError)         a report that holds what a check must not find
├── ProbeError (TypeError)               a probe that breaks its contract
└── RunFileError (OSError)               a run file that cannot be used
    ├── RunNotFoundError (FileNotFoundError)
    ├── RunExistsError (FileExistsError)
    ├── NotARunFileError                 not HDF5, damaged, or not written by keelscope
    ├── UnsupportedSchemaError           written by a newer major version
    └── SeriesNotFoundError (KeyError)   the run does not hold that series
```

Messages say what was found, what was expected and what to do; the command line prints them as they are.
"""

from __future__ import annotations

__all__ = [
    "BatchError",
    "CoverageWarning",
    "FactoryError",
    "HealthError",
    "InputSpecError",
    "KeelscopeError",
    "LossError",
    "ModelError",
    "NotARunFileError",
    "NothingToObserveError",
    "PluginWarning",
    "ProbeError",
    "RecordingWarning",
    "RunExistsError",
    "RunFileError",
    "RunNotFoundError",
    "SeriesNotFoundError",
    "TargetError",
    "UnknownNameError",
    "UnsupportedSchemaError",
    "UsageError",
]


class KeelscopeError(Exception):
    """Root of all errors raised by keelscope on purpose."""


class UsageError(KeelscopeError, ValueError):
    """An argument cannot be used as given."""


class UnknownNameError(UsageError, LookupError):
    """A name (probe, scheme, statistic, site pattern) matches nothing that exists."""


class InputSpecError(UsageError):
    """A batch description such as ``int64[4,128]<50257`` does not parse."""


class TargetError(KeelscopeError, LookupError):
    """A report target does not lead to a run file or a model."""


class FactoryError(TargetError):
    """A target was found, but calling it did not give a module."""


class ModelError(KeelscopeError, RuntimeError):
    """A model cannot be observed as asked."""


class BatchError(ModelError):
    """The model rejects the batch it was given."""


class LossError(ModelError):
    """The loss is not one real number that depends on the model."""


class NothingToObserveError(ModelError):
    """No parameter of the model requires a gradient."""


class HealthError(KeelscopeError, AssertionError):
    """A report holds a headline or finding that `Report.check` was told to fail on."""


class ProbeError(KeelscopeError, TypeError):
    """A probe breaks the contract of `keelscope.probe.Probe`."""


class RunFileError(KeelscopeError, OSError):
    """A run file cannot be used."""


class RunNotFoundError(RunFileError, FileNotFoundError):
    """No file has that path."""


class RunExistsError(RunFileError, FileExistsError):
    """The run file exists and may not be overwritten."""


class NotARunFileError(RunFileError):
    """The file is not HDF5, is damaged, or was not written by keelscope."""


class UnsupportedSchemaError(RunFileError):
    """The file was written by a newer major version of the format."""


class SeriesNotFoundError(RunFileError, KeyError):
    """The run does not hold the series asked for."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class PluginWarning(UserWarning):
    """A plugin package could not be loaded and was left out."""


class CoverageWarning(UserWarning):
    """Something that was asked for is not observed, and is not in the numbers."""


class RecordingWarning(UserWarning):
    """Recording stopped or lost rows while training went on."""
