"""Models of the Hugging Face hub, in its cache or fetched into it by huggingface_hub.

Layout of the cache: huggingface_hub, "Understand caching". Since version 2, ``trees/`` lists the
files of a commit. Without that list, the hub is asked for the files of a snapshot.
"""

from __future__ import annotations

import errno
import logging
import queue
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from clowder_aimage.content.file_system import measure_space
from clowder_aimage.errors import (
    AccessError,
    AImageError,
    FormatError,
    NetworkError,
    NoSpaceError,
    NotFoundError,
    StoreError,
    UnauthorizedError,
    UsageError,
    build_extra_error,
)
from clowder_aimage.formats import model_tree
from clowder_aimage.formats.left_out import LeftOut
from clowder_aimage.importer import hub_files
from clowder_aimage.importer.hub_environment import (
    HUB,
    is_offline,
    read_endpoint,
    resolve_cache_directory,
)
from clowder_aimage.importer.hub_files import ChosenFiles
from clowder_aimage.importer.model_source import ModelForm, take
from clowder_aimage.oci import Reference, read_json

_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REVISION = r"(?:refs/(?:pr|convert)/)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"
# Of a message of Python; the words follow
_ERRNO = re.compile(r"\[Errno -?[0-9]+\] ")
_PREFIX = re.compile(r"hf://|(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/")
_SHORT = re.compile(rf"(?P<repository>{_NAME}/{_NAME})(?:@(?P<revision>{_REVISION}))?")
_LONG = re.compile(
    rf"(?P<repository>{_NAME}/{_NAME})"
    rf"(?:@(?P<revision>{_REVISION})|/(?:tree|blob|resolve)/(?P<shown>{_REVISION}))?"
    r"(?:/(?P<file>[^?#]+?))?/?(?:\?[^#]*)?"
)
# Seconds for any request, and the slowest accepted rate of files in bytes per second.
_MIN_SECONDS, _MIN_RATE = 120.0, 64 * 1024
_T = TypeVar("_T")
_NOT_MODELS = ("datasets/", "spaces/", "collections/", "docs/")
_COMMIT = re.compile(r"[0-9a-f]{6,64}")
_TRANSPORTS = ("httpx", "httpx2", "httpcore", "requests", "urllib3", "ssl")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN, _MISSING = (401, 403), 404
_THE_HUB = "the Hugging Face hub"
_SPACE_HINT = "free some space, or name a directory on another disk in HF_HUB_CACHE"
_ACCESS_HINT = (
    "log in with 'hf auth login', or set HF_TOKEN to a token of an account that may read it"
)
_NETWORK_HINT = (
    "check the network, or name a mirror with HF_ENDPOINT; the same command resumes the download"
)


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the hub, a revision, and a file; an empty ``file`` stands for all files."""

    repository: str
    revision: str = "main"
    file: str = ""

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Parse ``hf://ORG/REPO[@REVISION][/FILE]``, a URL of the hub, or ``ORG/REPO``.

        Return None for a path: an existing one, one in an existing directory, or text in another
        form.

        Raises:
            UsageError: It begins as an address of the hub, but is not that of a model.
        """
        prefix = _PREFIX.match(text)
        form, address = (_LONG, unquote(text[prefix.end() :])) if prefix else (_SHORT, text)
        match = form.fullmatch(address)
        if match is None and prefix is None:
            return None
        path = Path(text)
        with model_tree.reading(path):
            if path.exists() or (prefix is None and path.parent.is_dir()):
                return None
        name = cls._of(match.groupdict()) if match else None
        if name is None and prefix is not None:
            raise UsageError(
                f"{text[:200]!r} does not name a model of the Hugging Face hub",
                hint="use hf://ORG/REPO, hf://ORG/REPO@REVISION or hf://ORG/REPO/FILE",
            )
        return name

    @classmethod
    def _of(cls, parts: dict[str, str | None]) -> HubName | None:
        repository, file = parts["repository"] or "", parts.get("file") or ""
        if "--" in repository or ".." in repository or repository.startswith(_NOT_MODELS):
            return None
        if file and {"", ".", ".."} & set(file.split("/")):
            return None
        return cls(repository, parts["revision"] or parts.get("shown") or "main", file)

    @property
    def origin(self) -> Reference:
        """The name of the repository for the rules of a policy, also from a mirror of the hub."""
        # Names of registries have no capitals.
        return Reference(HUB.partition("://")[2], self.repository.lower())

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision != "main" else ""
        return f"{self.repository}{revision}{self.file and '/' + self.file}"


@dataclass(frozen=True, slots=True)
class HubModel:
    """A snapshot in the cache: its path and commit, and the number and size of missing files.

    ``left_out`` are the files of the repository that are not packed.
    """

    name: HubName
    commit: str
    snapshot: Path
    files: int = 0
    size: int = 0
    left_out: tuple[LeftOut, ...] = ()

    @property
    def path(self) -> Path:
        """Return the path of the named file, else of the snapshot."""
        return self.snapshot / self.name.file

    @property
    def source(self) -> str:
        """Return the model's address on the hub, also for a mirror."""
        kind = "blob" if self.name.file else "tree"
        parts = (HUB, self.name.repository, kind, self.commit, self.name.file)
        return "/".join(filter(None, parts))


def find_model(
    name: HubName,
    form: ModelForm,
    version: str,
    on_plan: Callable[[HubModel], None] = lambda _: None,
    on_done: Callable[[int], None] = lambda _: None,
) -> HubModel:
    """Return a complete model of the hub in the cache; fetch the missing files.

    Args:
        name: The model.
        form: The form to pack, which decides the files.
        version: The version of the program, for the hub.
        on_plan: Called before files are fetched, with their number and size.
        on_done: Called with the bytes that arrived.

    Raises:
        NotFoundError: The model is not on the hub, or not in the cache without a network.
        UnauthorizedError: The hub requires a token, or its terms to be accepted.
        NetworkError: The hub does not answer, or answers with an error.
        NoSpaceError: The disk of the cache is full.
        UsageError: The package huggingface_hub is missing, or the repository holds several models.
        ModelError, FormatError: The repository holds no model that can be packed.
    """
    cached, missing = _find_complete(name, form)
    if cached is not None and _is_final(cached, missing):
        return cached
    _check_can_fetch(name, missing)
    try:
        return _Fetch(name, form, version).run(on_plan, on_done)
    except AccessError:
        if cached is None or missing:
            raise
        # All weights are in the cache; only the list of other files is unknown.
        return cached


def plan_fetch(
    name: HubName, form: ModelForm, version: str, *, asks_hub: bool = True
) -> HubModel | None:
    """Return the number and size of the files that ``find_model`` would fetch.

    They are 0 if the cache has the model. Without ``asks_hub`` they are None if it has not. Of the
    files only those that decide the choice are fetched, such as model_index.json. Raises as
    ``find_model``.
    """
    cached, missing = _find_complete(name, form)
    if cached is not None and not missing:
        return cached
    _check_can_fetch(name, missing)
    return _Fetch(name, form, version).plan() if asks_hub else None


def _find_complete(name: HubName, form: ModelForm) -> tuple[HubModel | None, str]:
    """Return the snapshot in the cache, and its first problem; empty if it is complete."""
    cached = _find_cached(name)
    return (None, "") if cached is None else _check_cached(cached, form)


def _is_final(cached: HubModel, missing: str) -> bool:
    """Return True if the hub has nothing to add to a snapshot, or cannot be asked."""
    return not missing and (_read_listing(cached) is not None or not _can_fetch())


def _check_can_fetch(name: HubName, missing: str) -> None:
    reason = f": {missing}" if missing else ""
    if is_offline():
        raise NotFoundError(
            f"{name} is not in the Hugging Face cache {resolve_cache_directory()} in full{reason}",
            hint="HF_HUB_OFFLINE is set: unset it to fetch the model",
        )
    if not _can_fetch():
        raise build_extra_error(
            f"{name} is not a path here and is not in the Hugging Face cache{reason}; fetching a "
            "model",
            "hf",
        )


def _can_fetch() -> bool:
    if is_offline():
        return False
    try:
        import huggingface_hub  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def _resolve_repository_directory(name: HubName) -> Path:
    return resolve_cache_directory() / f"models--{name.repository.replace('/', '--')}"


def _find_cached(name: HubName) -> HubModel | None:
    """Return the snapshot of a branch, tag or commit, if the cache has one."""
    directory, commit = _resolve_repository_directory(name), name.revision
    reference = directory / "refs" / name.revision
    if reference.is_file():
        commit = reference.read_text("utf-8", "replace").strip()
    snapshot = directory / "snapshots" / commit
    exists = _COMMIT.fullmatch(commit) is not None and snapshot.is_dir()
    return HubModel(name, commit, snapshot) if exists else None


def _read_listing(model: HubModel) -> dict[str, Any] | None:
    """Return huggingface_hub's list of the commit's files, or None."""
    path = _resolve_repository_directory(model.name) / "trees" / f"{model.commit}.json"
    try:
        files = read_json(path.read_bytes(), path.name, model_tree.MAX_JSON)["files"]
    except (OSError, FormatError, LookupError, TypeError):
        return None
    return files if isinstance(files, dict) else None


def _check_cached(model: HubModel, form: ModelForm) -> tuple[HubModel, str]:
    """Return a snapshot with its files left out, and its first problem; empty if complete."""
    listing = _read_listing(model)
    try:
        if listing is not None:
            chosen = _choose_files(model.name, form, set(listing), _create_reader(model.snapshot))
            missing = sorted(file for file in chosen.names if not (model.snapshot / file).is_file())
            model = replace(model, left_out=chosen.left_out)
            return model, f"{missing[0]} is missing" if missing else ""
        take(model.path, replace(form, is_chosen=True))
    except OSError as error:
        return model, f"{Path(str(error.filename)).name} cannot be read"
    except UsageError:
        # Fetching more files would not help.
        raise
    except AImageError as error:
        return model, error.message
    return model, ""


def _create_reader(snapshot: Path) -> hub_files.Read:
    return lambda name: (snapshot / name).read_bytes()


def _choose_files(
    name: HubName, form: ModelForm, files: set[str], read: hub_files.Read
) -> ChosenFiles:
    if not name.file:
        return hub_files.choose(name.repository, files, read, form.format, form.variant)
    if name.file not in files:
        raise NotFoundError(f"{name.repository} has no file {name.file}")
    return ChosenFiles(frozenset(hub_files.find_parts(name.file, files)))


class _Fetch:
    """A fetch by huggingface_hub, with its variables for mirrors and tokens."""

    def __init__(self, name: HubName, form: ModelForm, version: str) -> None:
        import huggingface_hub

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        self._hub: Any = huggingface_hub
        self._name, self._form = name, form
        self._options: dict[str, Any] = {
            "endpoint": read_endpoint(),
            "library_name": "aimage",
            "library_version": version,
        }

    def plan(self) -> HubModel:
        """Return the missing files of the model, without fetching them."""
        with _translating(self._name):
            plan, _ = self._choose()
        return plan

    def run(self, on_plan: Callable[[HubModel], None], on_done: Callable[[int], None]) -> HubModel:
        name, cache = self._name, resolve_cache_directory()
        with _translating(name):
            plan, chosen = self._choose()
            if plan.files:
                on_plan(plan)
            fetch = partial(
                self._hub.snapshot_download,
                name.repository,
                revision=name.revision,
                cache_dir=cache,
                allow_patterns=[escape(file) for file in sorted(chosen.names)],
                tqdm_class=_build_counter_class(on_done, plan.size),
                **self._options,
            )
            path = _call_in_time(plan.size, fetch)
        return replace(plan, commit=Path(path).name, snapshot=Path(path))

    def _choose(self) -> tuple[HubModel, ChosenFiles]:
        """Return the missing files, and all files of the model. Raises NoSpaceError."""
        name = self._name
        api = self._hub.HfApi(**self._options)
        ask = partial(api.model_info, name.repository, revision=name.revision)
        info = _call_in_time(0, partial(ask, files_metadata=True))
        sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or ()}
        snapshot = _resolve_repository_directory(name) / "snapshots" / info.sha
        chosen = _choose_files(
            name, self._form, set(sizes), lambda file: self._read(file, info.sha)
        )
        missing = [file for file in chosen.names if not (snapshot / file).is_file()]
        size = sum(sizes[file] for file in missing)
        plan = HubModel(name, info.sha, snapshot, len(missing), size, chosen.left_out)
        _check_space(plan, resolve_cache_directory())
        return plan, chosen

    def _read(self, file: str, commit: str) -> bytes:
        fetch = partial(
            self._hub.hf_hub_download,
            self._name.repository,
            file,
            revision=commit,
            cache_dir=resolve_cache_directory(),
            tqdm_class=_build_counter_class(lambda _: None, 0),
            **self._options,
        )
        return Path(_call_in_time(model_tree.MAX_JSON, fetch)).read_bytes()


def _call_in_time(size: int, call: Callable[[], _T]) -> _T:
    """Call a function of the library, with a timeout for ``size`` bytes. Raises NetworkError."""
    # The library limits only each read. A slower call continues in its daemon thread.
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=run, name="aimage-hub", daemon=True).start()
    seconds = _MIN_SECONDS + size / _MIN_RATE
    try:
        value, error = results.get(timeout=seconds)
    except queue.Empty:
        raise NetworkError(
            f"{_THE_HUB} does not answer in time ({seconds:.0f} s)", hint=_NETWORK_HINT
        ) from None
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def _build_counter_class(on_done: Callable[[int], None], size: int) -> type[Any]:
    """Return a subclass of tqdm that reports bytes, at most ``size``, and shows nothing."""
    from tqdm import tqdm

    class Counter(tqdm):  # type: ignore[misc]
        counted = 0
        # No thread that monitors the bars.
        monitor_interval = 0

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._is_bytes = options.get("unit") == "B"
            self._done = options.get("initial") or 0
            options.pop("name", None)
            super().__init__(*arguments, **options | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            if self._is_bytes:
                # Several bars may count the same bytes: their maximum is reported.
                with self.get_lock():
                    self._done += n or 0
                    increase = int(min(self._done, size)) - Counter.counted
                    Counter.counted += max(0, increase)
                if increase > 0:
                    on_done(increase)

    return Counter


def _check_space(plan: HubModel, cache: Path) -> None:
    space = measure_space(cache)
    if space is not None and plan.size > space.free:
        raise NoSpaceError(
            f"{plan.name} needs {plan.size / 1e9:.2f} GB in {cache}, "
            f"{space.free / 1e9:.2f} GB are free",
            missing_size=plan.size - space.free,
            hint=_SPACE_HINT,
        )


@contextmanager
def _translating(name: HubName) -> Iterator[None]:
    """Turn errors of huggingface_hub, of the network and of the disk into those of the project."""
    try:
        with warnings.catch_warnings():
            # The library warns about tokens, links and space, for which errors follow here.
            warnings.simplefilter("ignore")
            yield
    except AImageError:
        raise
    except Exception as error:
        translated = _translate(name, error)
        if translated is None:
            raise
        raise translated from error


def _translate(name: HubName, error: BaseException) -> AImageError | None:
    from huggingface_hub import errors

    model = name.repository
    if isinstance(error, errors.LocalEntryNotFoundError):
        cause = error.__cause__
        translated = _translate(name, cause) if cause is not None else None
        message = f"{model} cannot be fetched: {_THE_HUB} does not answer"
        return translated or NetworkError(message, hint=_NETWORK_HINT)
    if isinstance(error, errors.GatedRepoError):
        return UnauthorizedError(
            f"{model} requires a token, and its terms to be accepted",
            hint=f"accept them at {HUB}/{model}, and {_ACCESS_HINT}",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return NotFoundError(
            f"{model} not found, neither here nor on {_THE_HUB}; it may be private",
            hint=f"check the name; if it is private, {_ACCESS_HINT}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return NotFoundError(f"{model} has no revision {name.revision} on {_THE_HUB}")
    if isinstance(error, errors.HfHubHTTPError):
        return _build_status_error(model, error.response.status_code)
    if type(error).__module__.partition(".")[0] in _TRANSPORTS:
        reason = _ERRNO.sub("", str(error))
        return NetworkError(
            f"{model} cannot be fetched: {_THE_HUB} does not answer ({reason})", hint=_NETWORK_HINT
        )
    return _build_disk_error(model, error) if isinstance(error, OSError) else None


def _build_status_error(model: str, status: int) -> AImageError:
    if status == _MISSING:
        return NotFoundError(f"{_THE_HUB} lacks files of {model}")
    if status in _FORBIDDEN:
        return UnauthorizedError(
            f"{_THE_HUB} denied access to {model} ({status})", hint=_ACCESS_HINT
        )
    return NetworkError(
        f"{_THE_HUB} answered {status} to a request for {model}", hint=_NETWORK_HINT
    )


def _build_disk_error(model: str, error: OSError) -> AImageError:
    if error.errno in _FULL:
        return NoSpaceError(
            f"no space left for {model} in {resolve_cache_directory()}", hint=_SPACE_HINT
        )
    return StoreError(f"cannot fetch {model}: {error.strerror or error}")
