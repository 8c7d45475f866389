"""Where settings come from, and the order in which sources win.

``resolve`` takes an argument of the call first, then ``EASYCKPT_<FIELD>`` from the environment, then the YAML file
(``config=`` or ``EASYCKPT_CONFIG``), then the default. ``EASYCKPT_AUDIT`` (a JSON object) alone overrides arguments: an
unchanged training script can so be run into another directory with another schedule.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import yaml

from easyckpt.config import Audit, CheckpointConfig, converted, kinds_of
from easyckpt.errors import ConfigError

_log = logging.getLogger("easyckpt")
ENVIRONMENT_PREFIX = "EASYCKPT_"
CONFIG_VARIABLE = "EASYCKPT_CONFIG"
AUDIT_VARIABLE = "EASYCKPT_AUDIT"
_AUDIT_ONLY = tuple(field.name for field in dataclasses.fields(Audit))
#: Field -> its value, and where that came from.
_Sourced = dict[str, tuple[Any, str]]
_WORDS_OF_NONE = ("", "none", "null", "auto", "~")
_WORDS_OF_BOOL = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


def resolve(
    arguments: Mapping[str, Any],
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
) -> CheckpointConfig:
    """Build the configuration from all sources; see the module's docstring for which one wins.

    `arguments` holds what the caller gave. `config` is the path of a YAML file, or its content as a mapping. `environ`
    is os.environ unless given. `defaults` are an integration's, where they differ from ours. Raises ConfigError, naming
    the field and the source.
    """
    environ = os.environ if environ is None else environ
    if config is None:
        config = environ.get(CONFIG_VARIABLE) or None
    sourced: _Sourced = {name: (value, "the default") for name, value in (defaults or {}).items()}
    if isinstance(config, Mapping):
        sourced |= _from_config(config, "config")
    elif config is not None:
        sourced |= _from_config(_read_yaml(os.fspath(config)), f"config file {os.fspath(config)}")
    sourced |= _from_environment(environ)
    known = _known(arguments, "arguments")
    sourced |= {name: (_checked(name, value, "an argument"), "an argument") for name, value in known.items()}
    if environ.get(AUDIT_VARIABLE):
        sourced |= _from_audit(environ[AUDIT_VARIABLE])
    try:
        return CheckpointConfig(**{name: value for name, (value, _) in sourced.items()})
    except ConfigError as error:  # each value is good by itself: some do not go together
        origins = [f"{name} from {origin}" for name, (_, origin) in sourced.items() if name in str(error)]
        raise ConfigError(f"{error} ({', '.join(origins)})") from None


def _from_config(values: Mapping[str, Any], origin: str) -> _Sourced:
    return {name: (_read(name, value, origin), origin) for name, value in _known(values, origin).items()}


def _from_environment(environ: Mapping[str, str]) -> _Sourced:
    sourced: _Sourced = {}
    for name in _settable():
        variable = ENVIRONMENT_PREFIX + name.upper()
        if variable in environ:
            origin = f"environment variable {variable}"
            sourced[name] = (_read(name, environ[variable], origin), origin)
    _warn_of_misspelled(environ)
    return sourced


def _warn_of_misspelled(environ: Mapping[str, str]) -> None:
    """Unlike an argument, a variable may be meant for something else: it is named, and only where a setting is near."""
    names = _settable()
    for variable in environ:
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not variable.startswith(ENVIRONMENT_PREFIX) or name in names:
            continue
        if near := difflib.get_close_matches(name, names, n=1, cutoff=0.75):
            meant = ENVIRONMENT_PREFIX + near[0].upper()
            _log.warning("environment variable %s is no setting and changes nothing; did you mean %s?", variable, meant)


def _from_audit(text: str) -> _Sourced:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{AUDIT_VARIABLE} is not JSON ({error}): unset it, or give it settings") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{AUDIT_VARIABLE} must be a JSON object, not {content!r}")
    special = {name: content.pop(name) for name in _AUDIT_ONLY if name in content}
    return _from_config(content, AUDIT_VARIABLE) | {"audit": (Audit(**special), AUDIT_VARIABLE)}


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config: cannot read {path}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"config: {path} must be a mapping of settings, not a {type(content).__name__}")
    return content


def _settable() -> list[str]:
    return [field.name for field in dataclasses.fields(CheckpointConfig) if field.name != "audit"]


def _known(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """`values`, all of whose names are settings; ConfigError with the nearest name otherwise."""
    names = _settable()
    for name in values:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(names)}"
            raise ConfigError(f"{origin}: there is no setting {name!r}{hint}")
    return dict(values)


def _read(name: str, value: Any, origin: str) -> Any:
    return _checked(name, _from_text(name, value), origin)


def _checked(name: str, value: Any, origin: str) -> Any:
    try:
        return converted(name, value)
    except ConfigError as error:
        raise ConfigError(f"{error} (from {origin})") from None


def _from_text(name: str, value: Any) -> Any:
    """Read text from the environment or YAML as the field's type; other values, and bad text, are left alone."""
    kinds = kinds_of(name)
    if not isinstance(value, str):
        return value
    word = value.strip()
    if type(None) in kinds and word.lower() in _WORDS_OF_NONE:
        return None
    if tuple in kinds:
        return tuple(part for part in word.replace(",", " ").split() if part)
    if bool in kinds:
        return _WORDS_OF_BOOL.get(word.lower(), value)
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(word)
            except ValueError:
                return value
    return value
