"""An image model in this process. It stays loaded between prompts."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import click

from clowder_aimage.cli.console.lora_option import create_adapter_finder, offer
from clowder_aimage.cli.console.named_picture import get_named_pictures
from clowder_aimage.cli.console.option import get_settings
from clowder_aimage.cli.console.output import note, note_once, remark
from clowder_aimage.cli.console.picture_option import complete_request
from clowder_aimage.cli.worker.local_model import (
    Connect,
    FetchedModel,
    LocalOptions,
    fetch_model,
    load_model,
    show_steps,
)
from clowder_aimage.cli.worker.worker import Announce, PictureTask
from clowder_aimage.errors import AImageError, NotFoundError, UsageError, needs
from clowder_aimage.generation.effect import describe_ignored_parameters
from clowder_aimage.generation.encoding import PictureEncoding
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.library_choice import choose_library
from clowder_aimage.oci import Reference
from clowder_aimage.pictures.generated_picture import GeneratedPicture, encode_image

if TYPE_CHECKING:
    from clowder_aimage.dialect import AImage
    from clowder_aimage.engine.local_fetch import BackgroundPull
    from clowder_aimage.generate import RunnableModel
    from clowder_aimage.model.adapter_source import AdapterFinder
    from clowder_aimage.oci import Descriptor
    from clowder_aimage.pictures.provenance.signer import PictureSigner
    from clowder_aimage.pull import PullOptions


@dataclass(slots=True)
class LocalImageModel:
    """An image model in this process, loaded when it is first used.

    variant: the precision of the variant that is used, until the AImage itself replaces it between
    two prompts; None if it is not a variant.
    """

    reference: Reference
    options: LocalOptions
    connect: Connect
    finder: AdapterFinder
    fetched: FetchedModel
    variant: str | None = None
    signer: PictureSigner | None = None
    _loaded: RunnableModel | None = None
    _pull: BackgroundPull | None = None

    @classmethod
    def open(
        cls, reference: Reference, options: LocalOptions, draft: GenerateRequest
    ) -> LocalImageModel:
        """Return a fetched model. Its adapters for pictures of a draft are there too.

        Raises as ``choose_library``, ``AdapterFinder.fetch``, ``fetch_model``.
        """
        choose_library(options.backend, options.tuning)
        signer = _open_signer() if options.is_marked and options.is_signed else None
        connect = cache(get_settings().build_client_options)
        with needs("running a model", "mlx"):
            finder = create_adapter_finder(options.lora_dir, connect)
        # Before the model, which is larger.
        finder.fetch(draft)
        variant, fetched_name = options.precision, reference
        if variant is not None:
            fetched_name = _choose_variant(reference, variant, connect)
        fetched = fetch_model(fetched_name, connect)
        return cls(
            reference,
            options,
            connect,
            finder,
            fetched,
            None if fetched_name == reference else variant,
            signer,
        )

    def load(
        self, draft: GenerateRequest, *, is_last: bool
    ) -> tuple[RunnableModel, GenerateRequest]:
        """Return the model, and the request of a draft for it.

        It is loaded for this request, and for others unless it is the last one.
        """
        if self._pull is not None and self._pull.result.done():
            self._replace(self._pull, draft)
        request = _to_request(self.fetched.aimage.stored.aimage, draft)
        if self._loaded is None:
            self._loaded = self._load(self.fetched, request, is_last)
            # Prompts are typed below the bar.
            if not self.options.is_last:
                self.fetched.end()
                if self.variant is not None:
                    self._pull = pull_later(self.reference, self.variant, self.connect)
        return self._loaded, request

    def _load(
        self, fetched: FetchedModel, request: GenerateRequest, is_last: bool
    ) -> RunnableModel:
        pictures = get_named_pictures()
        # A wrong mask is refused before a load.
        pictures.keep(request.input.image, request.input.mask, *request.input.references)
        try:
            return load_model(fetched, request, self.options, self.finder, is_last=is_last)
        except UsageError:
            pictures.discard()
            raise

    def generate(
        self, draft: GenerateRequest, task: PictureTask, announce: Announce, *, is_last: bool
    ) -> Generator[GeneratedPicture, None, None]:
        """Yield the pictures of a draft of a task."""
        from clowder_aimage.cli.console.installation import install_command
        from clowder_aimage.generate import describe_picture
        from clowder_aimage.model.library_choice import SLOW

        model, request = self.load(draft, is_last=is_last)
        base, files = model.stored.aimage, self.fetched.aimage.files
        request, words = self.finder.resolve(request, base, files, adds_words=task.adds_words)
        offer(words)
        get_named_pictures().keep(
            request.input.image,
            request.input.mask,
            request.control.image,
            *request.input.references,
        )
        events = model.generate(request)
        is_marked = self.options.is_marked
        marking = model.plan_marking(request, self.signer, is_marked=is_marked)
        metadata = describe_picture(self.reference, model, request, marking)
        for warning in metadata.get("warnings", ()):
            note_once(f"warning: {warning}")
        with contextlib.closing(events):
            arrived = self.fetched.watch(events)
            announce(f"rendering on {model.backend}")
            if model.backend == SLOW:
                remark("warning: this takes many times longer than with OpenBLAS; to install it:")
                remark(f"  {install_command('mlx')}")
            for picture in show_steps(arrived, request):
                yield encode_image(picture, metadata, PictureEncoding(task.kind), marking)

    def _replace(self, pull: BackgroundPull, draft: GenerateRequest) -> None:
        """Load the AImage itself in place of its variant, or print the reason of a failure."""
        try:
            pull.result.result()
            fetched = fetch_model(self.reference, self.connect)
            request = _to_request(fetched.aimage.stored.aimage, draft)
            # Frees the memory before the load.
            self._loaded = None
            self._loaded = self._load(fetched, request, is_last=False)
            self.fetched = fetched
        except AImageError as error:
            message = f"{self.reference} cannot be used instead of its variant: {error.message}"
            note(f"warning: {message}")
        else:
            note(f"{self.reference} has been pulled and is used instead of its variant")
        self._pull = self.variant = None


def _to_request(aimage: AImage, draft: GenerateRequest) -> GenerateRequest:
    """Return the request of a draft with the defaults of an AImage. Raises UsageError."""
    from clowder_aimage.formats.controlnet import is_packed_with

    request = complete_request(draft, aimage)
    control = request.control
    if control.image is not None and control.network is None and not is_packed_with(aimage):
        raise UsageError(
            "this model has no ControlNet of its own", hint="set the model with --controlnet"
        )
    for warning in describe_ignored_parameters(request, draft.stated or ()):
        note_once(f"warning: {warning}")
    return request


def _open_signer() -> PictureSigner | None:
    """Return the signer that the configuration names, None without one. Raises UsageError."""
    from clowder_aimage.config.user_directory import find_config_file, read_user_configuration
    from clowder_aimage.pictures.provenance.signing_settings import parse_signing

    file = find_config_file()
    settings = read_user_configuration(lambda document: parse_signing(document, file))
    if settings is None:
        return None
    from clowder_aimage.pictures.provenance.signer import PictureSigner

    signer = PictureSigner.open(settings, lambda text: note_once(f"warning: {text}"))
    signer.check()
    return signer


def _choose_variant(reference: Reference, precision: str, connect: Connect) -> Reference:
    """Return the variant of an AImage that the store lacks, else ``reference``."""
    from clowder_aimage.engine.variant import find_variant
    from clowder_aimage.layout.completeness import check_stored
    from clowder_aimage.layout.stored_aimage import read_aimage

    if reference.digest is not None:
        raise UsageError("--first cannot be combined with a digest, which names one AImage")
    layout = get_settings().layout
    with contextlib.suppress(NotFoundError):
        if check_stored(layout, read_aimage(layout, reference)).is_complete:
            return reference
    if connect().expand(reference).registry is None:
        return reference
    variant = find_variant(reference, connect(), precision)
    if variant is None:
        remark(f"{reference} has no variant {precision}: it is used itself")
        return reference
    remark(f"the store lacks {reference}: its variant {precision} is used")
    return variant


def pull_later(reference: Reference, variant: str, connect: Connect) -> BackgroundPull:
    """Pull an AImage while its smaller variant is used, until the verb ends.

    From an index the variant is pulled only if it has no other.
    """
    from clowder_aimage.content.copy_option import ignore
    from clowder_aimage.content.platform import ManifestSelector
    from clowder_aimage.engine.local_fetch import BackgroundPull
    from clowder_aimage.pull import pull

    layout, connection = get_settings().layout, connect()

    def pull_aimage(options: PullOptions) -> Descriptor:
        pull_options = replace(options, selector=ManifestSelector(fallback_variant=variant))
        return pull(reference, layout, connection, pull_options).root

    context = click.get_current_context()
    lease = context.with_resource(layout.lease())
    return context.with_resource(BackgroundPull(pull_aimage, lease, ignore))
