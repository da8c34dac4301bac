"""Models by name: transformers (``hf:``), timm, torchvision, and keelscope's own schemes (``scheme:``).

``family:name?option=value&option=value`` builds the architecture with random weights, except that ``hf:DIR`` loads the
weights in the folder. The packages are imported here, when asked for; none of them is patched.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keelscope.errors import FactoryError, TargetError, UnknownNameError
from keelscope.targets.hub import hub_answers
from keelscope.targets.inputs import default_spec
from keelscope.targets.locate import first_line, suggestion

if TYPE_CHECKING:
    from torch import nn

__all__ = ["FAMILIES", "build", "is_family"]

Options = Mapping[str, object]
HEADS = ("Seq2SeqLM", "MaskedLM", "CausalLM", "ImageClassification")
"""Automatic classes of transformers, tried in this order for an architecture without weights."""


def is_family(target: str) -> bool:
    """Whether the target starts with a family's name and a colon."""
    return target.partition(":")[0] in FAMILIES and ":" in target


def build(target: str) -> tuple[nn.Module, str]:
    """Build a model of a family.

    Args:
        target: e.g. ``"scheme:keel?depth=64&width=64"``.

    Returns:
        The model, and the specification of an input that it takes (``""`` if none is known).

    Raises:
        TargetError: if the package or the name does not exist.
        FactoryError: if building the model fails.
    """
    family, _, rest = target.partition(":")
    name, _, query = rest.partition("?")
    if not name:
        raise TargetError(f"{target!r} names no model; {EXAMPLES[family]}.")
    return FAMILIES[family](name, _options(query, target))


def _options(query: str, target: str) -> dict[str, object]:
    options: dict[str, object] = {}
    for pair in filter(None, query.split("&")):
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise TargetError(f"{target!r}: {pair!r} is not option=value; write NAME?depth=64&width=64.")
        options[key] = _literal(value)
    return options


def _literal(text: str) -> object:
    words: dict[str, object] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value: object = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value


def _scheme(name: str, options: Options) -> tuple[nn.Module, str]:
    from keelscope.models import SCHEMES
    from keelscope.models import build as build_model

    if name not in SCHEMES:
        raise UnknownNameError(f"there is no scheme {name!r}{suggestion(name, SCHEMES)}")
    try:
        model = build_model(name, **options)
    except ValueError as error:
        raise TargetError(
            f"scheme:{name}: {str(error).rstrip('.')}{'' if str(error).endswith('?') else '.'}"
        ) from error
    return model, f"int64[4,64]<{options.get('vocabulary', 256)}"


def _timm(name: str, options: Options) -> tuple[nn.Module, str]:
    timm = _imported("timm", "timm")
    if "/" not in name and not timm.is_model(name):
        raise TargetError(f"timm has no model {name!r}{suggestion(name, timm.list_models())}")
    model = _guarded(lambda: timm.create_model(name, **options), f"timm:{name}")
    return model, default_spec(model)


def _torchvision(name: str, options: Options) -> tuple[nn.Module, str]:
    models = _imported("torchvision.models", "timm")
    if name not in models.list_models():
        raise TargetError(f"torchvision has no model {name!r}{suggestion(name, models.list_models())}")
    builder = models.get_model_builder(name)
    bare = {key: None for key in ("weights", "weights_backbone") if key in inspect.signature(builder).parameters}
    model = _guarded(lambda: builder(**{**bare, **options}), f"torchvision:{name}")
    kind = builder.__module__.removeprefix("torchvision.models.")
    return model, "" if kind.startswith(("detection", "video", "optical_flow")) else _crop(models, name)


def _crop(models: Any, name: str) -> str:
    weights = models.get_model_weights(name)
    transform = weights.DEFAULT.transforms() if len(weights) else None
    size = getattr(transform, "crop_size", None) or [224]
    return f"float32[4,3,{size[0]},{size[-1]}]"


def _hf(name: str, options: Options) -> tuple[nn.Module, str]:
    transformers = _imported("transformers", "huggingface")
    kind, _, rest = name.partition(":")
    if kind == "config" and rest:
        model = _from_config(transformers, rest, options)
    else:
        model = _from_weights(transformers, name, options)
    return model, default_spec(model)


def _from_config(transformers: Any, name: str, options: Options) -> Any:
    known = transformers.CONFIG_MAPPING
    if name not in known:
        raise TargetError(f"transformers has no architecture {name!r}{suggestion(name, known.keys())}")
    config = _guarded(lambda: transformers.AutoConfig.for_model(name, **options), f"hf:config:{name}")
    _reject_unknown(config, name, options)
    automatic = _automatic_class(transformers, config)
    return _guarded(lambda: automatic.from_config(config), f"hf:config:{name}")


def _reject_unknown(config: object, name: str, options: Options) -> None:
    """A configuration keeps any keyword, so a misspelt one would silently do nothing."""
    known = {*vars(type(config)()), *getattr(config, "attribute_map", {})}
    for key in options:
        if key not in known:
            raise TargetError(f"hf:config:{name} has no option {key!r}{suggestion(key, sorted(known))}")


def _automatic_class(transformers: Any, config: object) -> Any:
    for head in HEADS:
        automatic = getattr(transformers, f"AutoModelFor{head}")
        if type(config) in automatic._model_mapping:
            return automatic
    return transformers.AutoModel


def _from_weights(transformers: Any, name: str, options: Options) -> Any:
    here = {"local_files_only": True} if Path(name).is_dir() or not hub_answers() else {}
    try:
        config = transformers.AutoConfig.from_pretrained(name, **here)
    except (OSError, ValueError) as error:
        raise TargetError(_no_weights(name, error)) from error
    architectures = getattr(config, "architectures", None) or ["AutoModel"]
    model_class = getattr(transformers, architectures[0], None) or transformers.AutoModel
    with _no_progress_bar(transformers.utils.logging):
        return _guarded(lambda: model_class.from_pretrained(name, **here, **options), f"hf:{name}")


@contextmanager
def _no_progress_bar(logging: Any) -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _no_weights(name: str, error: Exception) -> str:
    if Path(name).is_dir():
        return f"hf:{name}: the folder holds no model that transformers can load ({first_line(error)})."
    return (
        f"hf:{name} is no folder here, and the hub did not give it (offline, or no such model); "
        f"give a local folder, or hf:config:{Path(name).name} for an architecture with random weights."
    )


def _imported(module: str, extra: str) -> Any:
    """Import a module of an optional package, or say how to get it."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise TargetError(f"{package} does not import here: {first_line(error)}.") from error
        raise TargetError(f"{package} is not installed; pip install 'keelscope[{extra}]'.") from error
    except Exception as error:  # binary mismatches show up as RuntimeError, OSError, AttributeError
        raise TargetError(
            f"{package} is installed but does not import with this torch ({first_line(error)}); "
            f"install the {package} release made for it."
        ) from error


def _guarded(make: Callable[[], Any], target: str) -> Any:
    try:
        return make()
    except Exception as error:  # an option of the wrong type or value surfaces anywhere in the library
        raise FactoryError(f"{target} could not be built: {_reason(error)} (--debug shows where).") from error


def _reason(error: BaseException) -> str:
    """An error and what first caused it: transformers hides a torchvision that does not import behind its own."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    cause = f", since {first_line(root)}" if root is not error else ""
    mismatch = "torchvision::" in str(root)
    remedy = "; install the torchvision made for this torch, or uninstall it" if mismatch else ""
    return f"{first_line(error)}{cause}{remedy}"


FAMILIES: Mapping[str, Callable[[str, Options], tuple[nn.Module, str]]] = {
    "hf": _hf,
    "scheme": _scheme,
    "timm": _timm,
    "torchvision": _torchvision,
}

EXAMPLES = {
    "hf": "write hf:DIR, hf:NAME or hf:config:gpt2?n_layer=4",
    "scheme": "write scheme:keel?depth=64&width=64",
    "timm": "write timm:resnet18",
    "torchvision": "write torchvision:resnet18",
}
