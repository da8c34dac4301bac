"""From a run to a verdict: one headline, findings with their evidence, and the layer table.

```
run -> evidence -> headline, rules, layers -> record -> report, comparison -> text, Markdown, JSON, CSV, HTML
```

`diagnose` is the door; `compare` puts several runs side by side.
"""

from __future__ import annotations

from keelscope.diagnosis.finding import Finding, Severity
from keelscope.diagnosis.report import Comparison, Report, compare, diagnose

__all__ = ["Comparison", "Finding", "Report", "Severity", "compare", "diagnose"]
