"""Wrong values of parameters by every way: one message and one bound. Also with ``--gateway``."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from clowder_aimage import Store, load
from clowder_aimage.errors import UsageError
from clowder_aimage.generation.check import describe
from clowder_aimage.generation.request import map_parameter_locations
from clowder_aimage.generation.seed import MIN_SEED
from tests.process import Aimage
from tests.wait import until
from tests.worker.conftest import LocalWorker

# Parameters that interfaces state otherwise
OTHERS = {"prompt", "previews", "original_prompt", "enhancer", "loras", "references"}


def wrong_values() -> Iterator[tuple[str, object]]:
    """Yield values below and above the bounds of each number, and one that is no choice."""
    for name, location in map_parameter_locations().items():
        bounds, kind = location.parameter.type.bounds, location.parameter.type.kind
        if name in OTHERS or kind not in (int, float):
            continue
        least = bounds.get("ge", bounds.get("gt"))
        if least:
            yield name, 0
            yield name, least / 2 if kind is float else least - 1
        elif "ge" in bounds:
            # -1 draws a seed, other negative ones of 64 bits count as unsigned
            yield name, MIN_SEED - 1 if name == "seed" else -1
        yield name, bounds["le"] + 1
        if "multiple_of" in bounds:
            yield name, least + 1
    yield "fit", "bend"


WRONG = list(dict.fromkeys(wrong_values()))
# Parameters that a client of ollama or a command line cannot state, or states otherwise
NOT_IN_OLLAMA = {"n"}
DEFAULTS_OF_OLLAMA = {("width", 0), ("height", 0), ("steps", 0)}


def expected(name: str, value: object) -> str:
    shown = "" if isinstance(value, str) else f", not {value}"
    return f"{name} must be {describe(map_parameter_locations()[name].parameter.type)}{shown}"


def refused(worker: LocalWorker, path: str, body: dict[str, Any]) -> str:
    """Return the message of a refusal (400)."""
    data = json.dumps({"model": "tiny", "prompt": "a fox", **body}).encode()
    request = urllib.request.Request(worker.url + path, data, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    assert caught.value.code == 400
    error = json.load(caught.value)["error"]
    message: str = error if isinstance(error, str) else error["message"]
    return message


def flag(name: str) -> str:
    return "-n" if name == "n" else f"--{name.replace('_', '-')}"


@pytest.fixture(scope="module")
def here(worker: LocalWorker) -> Aimage:
    return Aimage(worker.aimage.home, worker.store)


@pytest.fixture(scope="module")
def there(worker: LocalWorker) -> Aimage:
    return Aimage(worker.aimage.home, worker.store, {"AIMAGE_HOST": worker.url})


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_has_one_message_by_every_way(
    worker: LocalWorker, here: Aimage, there: Aimage, name: str, value: object
) -> None:
    message = expected(name, value)
    assert refused(worker, "/v1/images/generations", {name: value}) == message
    if (name, value) not in DEFAULTS_OF_OLLAMA and name not in NOT_IN_OLLAMA:
        assert refused(worker, "/api/generate", {name: value}) == message
        if map_parameter_locations()[name].group in ("sampling", "guidance"):
            assert refused(worker, "/api/generate", {"options": {name: value}}) == message
    for command, more in (here, ["--local"]), (there, ["--remote"]):
        option = f"{flag(name)}={value}" if name != "n" else f"-n{value}"
        failed = command("run", "tiny", "a fox", option, *more, code=2)
        assert failed.err.startswith(f"aimage: {message}\n"), failed.err


def test_wrong_values_of_python(worker: LocalWorker) -> None:
    with load("tiny", store=Store(worker.store)) as model:
        for name, value in WRONG:
            with pytest.raises(UsageError) as caught:
                model.generate("a fox", **{name: value})  # type: ignore[arg-type]
            assert caught.value.message == expected(name, value)


def test_wrong_values_in_a_batch(worker: LocalWorker) -> None:
    openai = pytest.importorskip("openai")
    lines = [
        {
            "custom_id": f"{number}",
            "method": "POST",
            "url": "/v1/images/generations",
            "body": {"model": "tiny", "prompt": "a fox", name: value},
        }
        for number, (name, value) in enumerate(WRONG)
    ]
    text = "\n".join(map(json.dumps, lines)).encode()
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="x", max_retries=0) as client:
        file = client.files.create(file=("lines.jsonl", text), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/images/generations",
            completion_window="24h",
        )
        ended = until(
            lambda: (
                (now := client.batches.retrieve(batch.id)).status in ("completed", "failed") and now
            )
        )
        results = client.files.content(ended.error_file_id).text.splitlines()
    for each in map(json.loads, results):
        assert each["response"]["status_code"] == 400
        message = each["response"]["body"]["error"]["message"]
        assert message == expected(*WRONG[int(each["custom_id"])])
    assert len(results) == len(WRONG)
