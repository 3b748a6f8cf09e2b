"""The latents of a pipeline, step by step, without a request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clowder_aimage.model.flow.denoiser import Drawing
from clowder_aimage.model.flow.forward_pass import PassRecord, StepPasses
from clowder_aimage.model.flow.memory_budget import Stage


def denoise(pipeline: Any, latents: Any, schedule: Any, conditioning: Any) -> Iterator[Any]:
    """Yield the latents after every step, with the adapters in use."""
    drawing = Drawing(pipeline.library, latents, schedule, conditioning)
    stage = Stage("denoise", (pipeline.networks.transformer,), 0.0)
    while not drawing.is_done:
        passes = drawing.list_passes()
        step = StepPasses(passes, pipeline.state.adapters, stage, 1, PassRecord())
        pipeline.compute([step])
        step.check()
        drawing.take_step()
        yield drawing.latents
