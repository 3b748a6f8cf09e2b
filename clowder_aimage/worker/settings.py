"""How a worker is set up: by the command line, the environment, the configuration, in this order.

The configuration is the project's one file (schemas/config.schema.json); the worker's part of it
is the object ``worker``, whose keys are the names of fields in camel case: ``maxModels`` in the
file is AIMAGE_SERVE_MAX_MODELS in the environment and ``--max-models`` on the command line.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from clowder_aimage import schema
from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.oci import Reference
from clowder_aimage.worker.engine import FOR_EVER, Limits

DEFAULT_ADDRESS = "127.0.0.1:11434"
PREFIX = "AIMAGE_SERVE_"
_PARTS = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration(value: object) -> float:
    """Seconds: 90, "90s", "5m", "1h30m", "500ms" (as Go writes them); what is negative is for ever.

    Raises:
        ValueError: it is no duration.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value):
        return FOR_EVER if value < 0 else float(value)
    text = str(value).strip().lower()
    sign, text = (-1, text[1:]) if text.startswith("-") else (1, text)
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        seconds = float(text)
    elif text and not _PARTS.sub("", text):
        seconds = sum(float(count) * _UNITS[unit] for count, unit in _PARTS.findall(text))
    else:
        raise ValueError(f"{str(value)!r} is not a duration such as 90, 30s, 5m or 1h30m")
    return FOR_EVER if sign < 0 and seconds else seconds


def _limit(value: object) -> float:
    """A duration that limits something; 0 does not."""
    return duration(value) or FOR_EVER


def _pairs(value: object) -> object:
    """``NAME=REF,NAME=REF``."""
    if not isinstance(value, str):
        return value
    found = {}
    for part in filter(None, map(str.strip, value.split(","))):
        name, equals, reference = part.partition("=")
        if not equals or not name or not reference:
            raise ValueError(f"{part!r} is not NAME=REF")
        found[name.strip()] = reference.strip()
    return found


def _words(value: object) -> object:
    return (
        tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value
    )


def _reference(text: str) -> str:
    try:
        Reference.parse(text)
    except UsageError as error:
        raise ValueError(error.message) from None
    return text


Name = Annotated[str, BeforeValidator(lambda value: _reference(str(value)))]
Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)]


class Settings(BaseSettings):
    """What a worker can be told. Made by ``effective``."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True)

    addr: str | None = None
    socket: Path | None = None
    token_file: Path | None = None
    allow_hosts: Words = ()
    max_models: int = Field(1, ge=1)
    queue: int = Field(8, ge=0)
    keep_alive: Annotated[float, BeforeValidator(duration)] = 300.0
    deadline: Annotated[float, BeforeValidator(_limit)] = FOR_EVER
    grace: Annotated[float, BeforeValidator(duration)] = 30.0
    default_model: Name | None = None
    aliases: Annotated[dict[str, Name], NoDecode, BeforeValidator(_pairs)] = {}
    wanted: Annotated[tuple[Name, ...], NoDecode, BeforeValidator(_words)] = ()
    dtype: Literal["float32", "f32", "bfloat16", "bf16"] | None = None
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Ours alone: no file in the working directory says anything."""
        return (init_settings,)

    @property
    def limits(self) -> Limits:
        return Limits(
            queue=self.queue,
            models=self.max_models,
            keep_alive=self.keep_alive,
            deadline=self.deadline,
            dtype=self.dtype,
        )

    @property
    def address(self) -> str | None:
        """Where to listen on TCP: the usual place unless something else was said."""
        return self.addr or (None if self.socket else DEFAULT_ADDRESS)


def effective(options: Mapping[str, Any], file: Path | None) -> tuple[Settings, dict[str, str]]:
    """The settings, and where each comes from that is no default.

    Raises:
        UsageError: the file cannot be used, or something cannot be meant; it says what and where.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    said = {key: value for key, value in options.items() if value not in (None, (), {})}
    for found, place in (
        (read_section(file) if file else {}, f"{file}"),
        (_environment(), "environment"),
        (said, "command line"),
    ):
        for key, value in found.items():
            values[key] = value
            origins[key] = f"{PREFIX}{key.upper()}" if place == "environment" else place
    try:
        return Settings(**values), origins
    except ValidationError as error:
        raise UsageError(_sentence(error, origins)) from None


def _environment() -> dict[str, Any]:
    from pydantic_settings import EnvSettingsSource

    return {key: value for key, value in EnvSettingsSource(Settings)().items() if value != ""}


def read_section(file: Path) -> dict[str, Any]:
    """The worker's part of a configuration, by the names of fields. Raises UsageError."""
    try:
        document = json.loads(file.read_bytes())
        schema.validate("config", document)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError, FormatError) as error:
        raise UsageError(
            f"cannot use the configuration {file}: {error}", hint="see schemas/config.schema.json"
        ) from None
    section: dict[str, Any] = document.get("worker", {})
    found = {_snake(key): value for key, value in section.items()}
    for name in ("socket", "token_file"):
        if name in found:  # a relative path begins at the configuration
            found[name] = str(file.parent / found[name])
    return {key: value for key, value in found.items() if key in Settings.model_fields}


def _snake(name: str) -> str:
    return re.sub(r"[A-Z]", lambda found: f"_{found[0].lower()}", name)


def camel(name: str) -> str:
    """What a field is called in the configuration."""
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def _sentence(error: ValidationError, origins: Mapping[str, str]) -> str:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    place = origins.get(name, "")
    option = "--" + {"aliases": "alias", "allow_hosts": "allow-host"}.get(name, name)
    what = option.replace("_", "-") if place == "command line" else camel(name)
    where = "" if place == "command line" else f" ({place})"
    return f"{what}{where}: {first['msg'].removeprefix('Value error, ')}"
