"""The computation of forward passes: of each alone, or of those of several pictures at once."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

from clowder_aimage.errors import NoMemoryError
from clowder_aimage.model.flow.family import FlowFamily
from clowder_aimage.model.flow.forward_pass import ForwardPass, StepPasses
from clowder_aimage.model.flow.networks import FlowNetworks

# A pass, with the step that it is a part of
Row = tuple[StepPasses, ForwardPass]
_log = logging.getLogger(__name__)


class PassComputer:
    """Computes the passes of a model's pictures, by the table of its library.

    Passes are computed at once if their pictures have the same size, no inputs but a caption, and
    no cache of steps. Their times, captions and adapters may differ, but for adapters that change
    values of the weights.
    """

    def __init__(self, family: FlowFamily, networks: FlowNetworks) -> None:
        self._family, self._networks = family, networks

    def compute(self, steps: Sequence[StepPasses]) -> None:
        """Compute the passes of steps. Their errors are stored, each in its step."""
        groups: dict[Hashable, list[Row]] = {}
        for step in steps:
            try:
                keys = [self._build_key(step, each) or id(each) for each in step.passes]
            except Exception as error:
                step.error = error
                continue
            for key, each in zip(keys, step.passes, strict=True):
                groups.setdefault(key, []).append((step, each))
        for rows in groups.values():
            limit = self._get_limit(rows[0][0])
            for start in range(0, len(rows), limit):
                self._compute_rows(rows[start : start + limit])
        try:
            self._networks.library.pace()
        except Exception as error:
            # The device computes later than it is called
            for step in steps:
                step.error = step.error or error

    def _get_limit(self, step: StepPasses) -> int:
        """Return how many passes are computed at once, by the table and the memory."""
        budget = self._networks.budget
        limit = self._networks.library.batches.get_limit(step.pixels)
        while limit > 1 and not budget.has_work(step.stage, step.pixels, limit):
            limit -= 1
        return limit

    def _build_key(self, step: StepPasses, each: ForwardPass) -> Hashable | None:
        """Return what is equal in passes that are computed at once; None for one that is not."""
        is_alone = each.inputs is not None or each.cache is not None
        if is_alone or self._networks.library.batches.get_limit(step.pixels) == 1:
            return None
        module = self._networks.transformer
        transformer, adaptation = module.get(), module.adaptation
        if not transformer.is_batch_ready:
            return None
        shape = *each.latents.shape, *transformer.get_caption_key(each.caption)
        if adaptation is None or adaptation.can_mix(step.adapters):
            return step.pixels, shape
        return step.pixels, shape, step.adapters

    def _compute_rows(self, rows: Sequence[Row]) -> None:
        if len(rows) > 1:
            try:
                self._compute_together(rows)
            except Exception as error:
                # Of one of them perhaps, which fails again alone
                facts = {"count": len(rows), "error": type(error).__name__}
                _log.warning("pictures cannot be computed at once", extra=facts)
                if isinstance(error, NoMemoryError):
                    self._networks.library.batches.lower(rows[0][0].pixels, len(rows))
            else:
                return
        for step, each in rows:
            if step.error is None:
                try:
                    self._compute_alone(step, each)
                except Exception as error:
                    step.error = error

    def _compute_alone(self, step: StepPasses, each: ForwardPass) -> None:
        library, module = self._networks.library, self._networks.transformer
        if module.adaptation is not None:
            module.adaptation.use(step.adapters)
        # It may have been released since the last step
        module.get()
        library.forms.clear()
        with self._networks.budget.measure(step.stage, step.pixels):
            self.predict([each])
        step.record.add(1, library.forms)

    def _compute_together(self, rows: Sequence[Row]) -> None:
        library, module = self._networks.library, self._networks.transformer
        if module.adaptation is not None:
            module.adaptation.use_each([step.adapters for step, _ in rows])
        # It may have been released since the last step
        module.get()
        library.forms.clear()
        # The memory of several pictures is that of a larger one
        pixels = len(rows) * rows[0][0].pixels
        with self._networks.budget.measure(rows[0][0].stage, pixels):
            self.predict([each for _, each in rows])
        for step, _ in rows:
            step.record.add(len(rows), library.forms)

    def predict(self, passes: Sequence[ForwardPass]) -> None:
        """Compute passes at once, with the adapters that the transformer has."""
        library, transformer = self._networks.library, self._networks.transformer.get()
        if len(passes) == 1:
            (only,) = passes
            typed = library.to_array(only.latents)
            parts = typed, only.time, only.caption, only.inputs, only.cache
            only.velocity = library.hold(self._family.predict_velocity(transformer, *parts))
            return
        inputs = [(library.to_array(each.latents), each.time, each.caption) for each in passes]
        velocities = self._family.predict_velocities(transformer, inputs)
        for each, velocity in zip(passes, velocities, strict=True):
            each.velocity = library.hold(velocity)
