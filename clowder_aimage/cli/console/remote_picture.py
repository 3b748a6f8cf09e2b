"""Pictures that a worker generates."""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from clowder_aimage.cli.console.lora_option import to_worker
from clowder_aimage.cli.console.output import one_line, remark
from clowder_aimage.cli.console.picture_option import to_request
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.cli.console.remote_worker import StepBar, check_model, warn, warn_of
from clowder_aimage.errors import FormatError, NetworkError
from clowder_aimage.generation.request import places
from clowder_aimage.model.picture_facts import facts_of, kind_of
from clowder_aimage.oci import Reference
from clowder_aimage.pictures.made_picture import MadePicture

if TYPE_CHECKING:
    from clowder_aimage.engine.worker_client import WorkerClient


_PICTURES = ("image", "mask", "control", "references")


def generate_remotely(
    client: WorkerClient,
    reference: Reference,
    place: str,
    more: Callable[[], Mapping[str, Any]],
    options: Mapping[str, Any],
    count: int,
    kind: str,
    announce: Callable[[str], None],
) -> Generator[MadePicture, None, None]:
    """Generate the pictures in a worker; ``more`` returns further fields of the requests."""
    # png_facts: so that it can be replayed
    plain = {name: value for name, value in options.items() if name not in _PICTURES}
    sent = {**plain, "png_facts": True, "output_format": kind}
    prompt = None if options["trigger"] else options["prompt"]
    sent["loras"] = to_worker(client, options["loras"], prompt) or None
    sent["trigger"] = options["trigger"] or None
    sent |= {**to_request(options), **more()}
    where = f"rendering on the {place}"
    yield from _pictures(client, reference, sent, count, on_accepted=lambda: announce(where))


def _pictures(
    client: WorkerClient,
    reference: Reference,
    options: Mapping[str, Any],
    count: int,
    *,
    on_accepted: Callable[[], None],
) -> Generator[MadePicture, None, None]:
    """Request ``count`` pictures, with rising seeds, and show a bar of the steps.

    Each is a request of its own: a finished picture can be kept, and other clients are served in
    between. Closing the iterator cancels the running request. ``on_accepted`` is called when the
    worker has accepted the first.

    Raises:
        AImageError: as ``WorkerClient``. NotFoundError: the worker has another model only.
        FormatError: the answer is not a picture in ``output_format``.
    """
    with contextlib.ExitStack() as bars:
        run = _Run(client, reference, count, options["output_format"], bars)
        for index in range(count):
            seed = options["seed"] + index
            body = _request(reference, {**options, "seed": seed})
            with contextlib.closing(client.events("/v1/images/generations", body)) as events:
                data = run.finish(events, index, on_accepted)
            facts = _facts(data)
            if "original_prompt" in facts:
                remark(f"prompt: {one_line(str(facts.get('prompt')))}")
            yield MadePicture(data, seed, options["output_format"], facts)


class _Run:
    """Requests for pictures of one model; a pull is shown until the first step."""

    def __init__(
        self,
        client: WorkerClient,
        reference: Reference,
        count: int,
        kind: str,
        bars: contextlib.ExitStack,
    ) -> None:
        self._client, self._reference = client, reference
        self._count, self._bars, self._task, self._kind = count, bars, "", kind

    def finish(
        self,
        events: Iterable[tuple[str, Mapping[str, Any]]],
        index: int,
        on_accepted: Callable[[], None],
    ) -> bytes:
        """Return picture ``index``; show the events until it is complete."""
        for kind, value in events:
            if kind == "open":
                check_model(self._client, self._reference, value)
                warn_of(value)
                if index == 0:
                    on_accepted()
            elif kind == "pull":
                self._bar("pulling", "bytes").show(value.get("completed"), value.get("total"))
            elif kind == "progress":
                self._show_steps(value, index)
            elif kind == "done":
                warn(value.get("warnings"))  # of a model that was pulled first
                return _decoded(value, self._kind)
        raise NetworkError(
            f"the worker at {self._client.endpoint} disconnected before the picture was complete"
        )

    def _show_steps(self, value: Mapping[str, Any], index: int) -> None:
        # All pictures have the same number of steps
        step, total = value.get("step"), value.get("total")
        if type(step) is int and type(total) is int:
            bar = self._bar("rendering", "steps")
            bar.show(index * total + step, self._count * total)
            bar.rename("decoding" if step == total else "rendering")

    def _bar(self, task: str, unit: str) -> StepBar:
        if task != self._task:
            self._bars.close()
            subject = self._reference if task == "pulling" else None
            progress = Progress(task, subject, unit=unit)
            self._task, self._now = task, StepBar(self._bars.enter_context(progress))
        return self._now


def _request(reference: Reference, options: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: place.parameter.field for name, place in places().items()}
    given = {fields.get(key, key): value for key, value in options.items() if value is not None}
    if "width" in given and "height" in given:
        given["size"] = f"{given.pop('width')}x{given.pop('height')}"
    fixed = {"n": 1, "response_format": "b64_json"}
    # strict: the worker refuses unknown fields
    stream = {"stream": True, "stream_format": "ollama", "strict": True}
    return {"model": str(reference), **given, **fixed, **stream}


def _decoded(value: Mapping[str, Any], kind: str) -> bytes:
    try:
        data = base64.b64decode(value["data"][0]["b64_json"], validate=True)
    except (LookupError, TypeError, binascii.Error):
        data = b""
    if kind_of(data) != kind:
        raise FormatError(f"invalid response from the worker: expected a {kind.upper()} picture")
    return data


def _facts(data: bytes) -> dict[str, Any]:
    """Return the facts of a picture; empty if it has none that can be read."""
    try:
        return facts_of(data)
    except FormatError:
        return {}
