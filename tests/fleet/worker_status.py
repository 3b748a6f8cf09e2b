"""Reports of workers of a fleet."""

from __future__ import annotations

from typing import Any

from clowder_aimage.fleet.worker_registry import WorkerStatus

A, B, C = (f"sha256:{letter * 64}" for letter in "abc")


def status_of(name: str, **facts: Any) -> WorkerStatus:
    """Return the report of a worker that has the image model A, unless ``facts`` say otherwise."""
    models = facts.pop("models", {"m:latest": A})
    return WorkerStatus(name, models=models, kinds={A: "image", B: "text"}, **facts)
