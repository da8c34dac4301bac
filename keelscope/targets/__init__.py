"""From what a user types to a model with a batch and a loss, ready for `keelscope.report`.

`locate` imports a named object, `families` builds models of transformers, timm, torchvision and our own schemes,
`inputs` makes batches, `losses` chooses the loss. Everything wrong is one sentence: what, where, what to do.

```
"hf:config:gpt2?n_layer=4"  families ─┐
"pkg.module:factory"        locate   ─┴─> model ─> inputs ─> batch ─> losses ─> Case ─> keelscope.report
```
"""

from __future__ import annotations

from keelscope.targets.case import Case, is_model_target, resolve

__all__ = ["Case", "is_model_target", "resolve"]
