"""``python -m keelscope`` is ``keelscope``."""

from __future__ import annotations

import sys

from keelscope.cli import main

sys.exit(main())
