"""The command line: ``keelscope report``, ``train``, ``demo``, ``compare``, ``list``, and the commands of plugins.

`main` turns every expected error into one sentence and an exit code; each command lives in its own file and has an
``add_command``, as the commands of plugin packages do. What a command needs (torch, scipy, h5py) is imported when it
runs, so that ``keelscope --help`` answers at once.

```
exit 0    done
     1    a finding matched --fail-on
     2    usage or bad input: one sentence on stderr
     3    a bug in keelscope: one sentence, and how to report it
     130  interrupted
```
"""

from __future__ import annotations

from keelscope.cli.application import main

__all__ = ["main"]
