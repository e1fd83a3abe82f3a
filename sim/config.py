"""Configs: composed by Hydra, checked against the constructors they name, and turned into objects.

The YAML files in `conf/` hold each knob's default, unit and source; the constructor behind `_target_` holds its type.
`build` brings the two together, so that a wrong name or type is one line that says which knob.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Container, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import setup_globals
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from sim.compiled import as_written
from sim.files import cannot_write
from workloads.errors import UserError

T = TypeVar("T")
LISTED = 8  # options that an error lists when none is near
EXTRAS = {  # of Hydra's plugins
    "hydra/launcher": {"joblib": "parallel", "ray": "ray", "submitit_slurm": "slurm", "submitit_local": "slurm"},
    "hydra/sweeper": {"optuna": "search"},
}


def run_command(name: str, task: Callable[[DictConfig], object], argv: list[str]) -> int:
    """Composes `conf/<name>.yaml` with the overrides in `argv` and runs `task` on the result, once or as a sweep.

    What a task returns goes to Hydra's sweeper, for which it is the value of a point.

    Raises:
        UserError: a group, option or value that does not exist or has the wrong type.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let errors come to us instead of being printed with advice about Hydra
    program, sys.argv = sys.argv, [f"kvtwin {name}", *argv]
    errors: list[Exception] = []

    @functools.wraps(task)
    def guarded(config: DictConfig) -> object:
        try:
            return task(config)
        except Exception as error:  # taken past Hydra, which would print its own words beside ours
            errors.append(error)
            return None

    shown = [option for option in ("-m", "--multirun", "--cfg", "-c", "--info", "-i") if option in argv]
    if len(shown) > 1:
        raise UserError(f"{' and '.join(shown)} do not go together; leave one of them out.")
    GlobalHydra.instance().clear()
    setup_globals()
    try:
        hydra.main(version_base="1.3", config_path="pkg://conf", config_name=name)(guarded)()
        if errors:
            raise errors[0]
    except SystemExit as exit_:  # Hydra's own --help and --version, and the end of a sweep
        if isinstance(exit_.code, str):  # what an error in a callback or a worker has to say
            raise UserError(exit_.code) from None
        return exit_.code if isinstance(exit_.code, int) else 0
    except MissingConfigException as error:
        raise UserError(_missing_config(error)) from None
    except ConfigCompositionException as error:
        raise UserError(_composition(error, name, argv)) from None
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key} is not set; give it as {error.full_key}=VALUE.") from None
    except OverrideParseException as error:
        raise UserError(f"{error.override} is not understood; options are given as key=value.") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"option not understood: {_one_line(error)}") from None
    except OSError as error:  # Hydra makes the run's folder
        if error in errors:
            raise
        raise cannot_write(Path(str(error.filename)), error) from None
    finally:
        sys.argv = program
    return 0


def build(node: DictConfig | None, name: str, aside: Container[str] = (), **supplied: Any) -> Any:
    """Calls the constructor that `node._target_` names with the options of `node`, checked against its annotations.

    Args:
        node: options, with `_target_` the dotted name of a class or function; sub-nodes with one are built too.
        name: where the node stands in the config, for messages.
        aside: options of the node that are not for its constructor.
        supplied: what the run knows and the user need not say (seed, model limit …); fills parameters that the node or
            a sub-node leaves out or null. What no constructor asks for is left aside.

    Raises:
        UserError: unknown, missing or wrongly typed option; the message names it.
    """
    if node is None or "_target_" not in node:
        raise UserError(f"{name} has no _target_; choose one of the bundled options or name a class.")
    target = _imported(str(node["_target_"]), f"{name}._target_")
    written = as_written(target) if inspect.isclass(target) else target
    parameters = inspect.signature(written).parameters
    annotations = typing.get_type_hints(
        written.__init__ if inspect.isclass(written) else written, vars(sys.modules[target.__module__])
    )
    arguments: dict[str, Any] = {}
    for key in map(str, node):
        if key == "_target_" or key in aside:
            continue
        if key not in parameters:
            raise UserError(f"{name}.{key} is not an option of {target.__name__}; {_nearest(key, parameters)}")
        if OmegaConf.is_missing(node, key):
            raise UserError(f"{name}.{key} is not set; give it as {name}.{key}=VALUE.")
        if node[key] is not None or key not in supplied:
            arguments[key] = typed(node[key], annotations.get(key, Any), f"{name}.{key}", **supplied)
    for key, value in supplied.items():
        if key in parameters:
            arguments.setdefault(key, value)
    for key, parameter in parameters.items():
        if (
            key not in arguments
            and parameter.default is parameter.empty
            and parameter.kind is not parameter.VAR_KEYWORD
        ):
            raise UserError(f"{name}.{key} is not set; give it as +{name}.{key}=VALUE.")
    return target(**arguments)


def _imported(dotted: str, name: str) -> Any:
    module, _, attribute = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{name}={dotted} cannot be imported: {_one_line(error)}.") from None


def fill(target: type[T], config: Mapping[str, Any], name: str = "") -> T:
    """A dataclass whose fields are the options of the same names; other options are left aside.

    Args:
        target: the dataclass.
        config: has the options.
        name: where they stand in the whole config, for messages; nothing for its top.

    Raises:
        UserError: a missing option or a wrong type; the message names it.
    """
    kinds = typing.get_type_hints(target)
    names = {option: f"{name}.{option}" if name else option for option in kinds}
    for option, shown in names.items():
        if option not in config:
            raise UserError(f"{shown} is not set; give it as +{shown}=VALUE.")
    return target(**{option: typed(config[option], kind, names[option]) for option, kind in kinds.items()})


def whole_number(config: DictConfig, name: str, least: int, **supplied: Any) -> int:
    """The option with the dotted `name`, a whole number of at least `least`, or what a rule that stands there yields.

    Args:
        config: has the option.
        name: of the option.
        least: the smallest that is allowed.
        supplied: what a rule may ask for, see `build`.

    Raises:
        UserError: it is missing or something else; the message names it.
    """
    value = OmegaConf.select(config, name)
    if isinstance(value, DictConfig) and "_target_" in value:
        value = build(value, name, **supplied)
    if not _is_number(value) or value != value // 1 or value < least:
        raise UserError(f"{name} is {value!r}; expected a whole number of at least {least}.")
    return int(value)


def resolved(config: DictConfig) -> str:
    """The config as YAML with every interpolation replaced by its value."""
    return OmegaConf.to_yaml(config, resolve=True)


def resolved_part(config: DictConfig, name: str) -> Any:
    """One option or group with every interpolation replaced by its value, as JSON has it."""
    value = config[name]
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value


def typed(value: Any, annotation: Any, name: str, **supplied: Any) -> Any:
    """`value` as `annotation` wants it; `name` is what the user calls it. Whole floats such as 1e6 pass for integers.

    Raises:
        UserError: it is something else; the message names it.
    """
    if isinstance(value, DictConfig) and "_target_" in value:
        return build(value, name, **supplied)
    if typing.get_origin(annotation) is dict and isinstance(value, DictConfig):
        _, kind = typing.get_args(annotation)
        return {key: typed(value[key], kind, f"{name}.{key}", **supplied) for key in map(str, value)}
    if isinstance(value, (DictConfig, ListConfig)):
        value = OmegaConf.to_container(value, resolve=True)
    origin, choices = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        for choice in choices:
            try:
                return typed(value, choice, name, **supplied)
            except UserError:
                continue
    elif annotation is types.NoneType or annotation is None:
        if value is None:
            return None
    elif origin is typing.Literal:
        if value in choices:
            return value
        raise UserError(f"{name} is {value!r}; expected {_either(map(str, choices))}.")
    elif origin in (list, tuple):
        if isinstance(value, list):
            return origin(typed(item, choices[0], f"{name}[{i}]", **supplied) for i, item in enumerate(value))
    elif annotation is bool:
        if isinstance(value, bool):
            return value
    elif annotation is int:
        if _is_number(value) and value == value // 1:
            return int(value)
    elif annotation is float:
        if _is_number(value):
            return float(value)
    elif annotation in (str, Path):
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return annotation(str(value))
    elif inspect.isclass(annotation) and isinstance(value, annotation):
        return value
    raise UserError(f"{name} is {value!r}; expected {_kind(annotation)}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _kind(annotation: Any) -> str:
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return _either(_kind(choice) for choice in typing.get_args(annotation))
    if annotation is types.NoneType:
        return "null"
    return kinds.get(annotation, f"a {getattr(annotation, '__name__', annotation)}")


def _either(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def _nearest(word: str, options: Iterable[str]) -> str:
    options = sorted(options)
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    more = "" if len(options) <= LISTED else f" and {len(options) - LISTED} more"
    return f"the options are {', '.join(options[:LISTED])}{more}."


def _missing_config(error: MissingConfigException) -> str:
    group, _, choice = str(error.missing_cfg_file or "").rpartition("/")
    if (extra := EXTRAS.get(group, {}).get(choice)) is not None:
        return f"{group}={choice} needs the extra: pip install 'kvtwin[{extra}]'"
    if error.options and group:
        return f"there is no {group} named {choice}; {_nearest(choice, error.options)}"
    return _one_line(error)


def _composition(error: ConfigCompositionException, name: str, argv: list[str]) -> str:
    """Names the option, and the nearest one that exists where it is a matter of spelling."""
    text = _one_line(error)
    if match := re.search(r"Could not override '([^']+)'", text):
        key = match[1].lstrip("+~")
        group = key.replace(".", "/")
        if "." in key and resources.files("conf").joinpath(group).is_dir():
            return f"{key} is chosen as a group: {group}=NAME; {_nearest('', _choices(group))}"
        return f"there is no option {key}; {_nearest(key, _known_options(name, argv, key))}"
    if match := re.search(r"No match in the defaults list", text):
        key = re.search(r"override '([^']+)'", text)
        return f"there is no group {key[1] if key else ''}; {text}"
    return f"option not understood: {text}"


def _choices(group: str) -> list[str]:
    return [file.name.removesuffix(".yaml") for file in resources.files("conf").joinpath(group).iterdir()]


def _known_options(name: str, argv: list[str], bad: str) -> list[str]:
    """Every dotted option of the config as it is without the override that failed."""
    rest = [word for word in argv if "=" in word and bad not in word.partition("=")[0] and "," not in word]
    GlobalHydra.instance().clear()
    with hydra.initialize_config_module("conf", version_base="1.3"):
        try:
            config = hydra.compose(name, overrides=rest)
        except (HydraException, OmegaConfBaseException):
            config = hydra.compose(name)
    return list(_dotted(OmegaConf.to_container(config, resolve=False), ""))


def _dotted(node: Any, prefix: str) -> Iterable[str]:
    for key, value in node.items():
        if key == "_target_":
            continue
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")


def _one_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
