"""Verbs that send requests to a worker, against scripted workers."""

from __future__ import annotations

import base64
import io
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from PIL import Image, PngImagePlugin

from tests.cli.test_startup import HEAVY, imported
from tests.process import Aimage, Done
from tests.scripted_worker import Asked, Says, ScriptedWorker, event, line, says

DIGEST = "ab" * 32
TINY = {"name": "tiny:latest", "model": "tiny:latest", "digest": DIGEST, "size": 1_200_000}
GENERATIONS = "/v1/images/generations"


def png(**facts: object) -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text("Software", "x")
    if facts:
        info.add_itxt("aimage", json.dumps(facts, ensure_ascii=False))
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()


def done(data: bytes) -> bytes:
    pictures = [{"b64_json": base64.b64encode(data).decode()}]
    return event("done", {"created": 1, "data": pictures})


def step(index: int, total: int) -> bytes:
    return event("progress", {"step": index, "total": total})


def drawing(asked: Asked) -> Says:
    """Return a script of a worker that generates any image in two steps."""
    facts = {"seed": asked.value["seed"], "prompt": "Füchse"}
    return Says([step(1, 2), step(2, 2), done(png(**facts))])


@pytest.fixture
def at(aimage: Callable[[], Aimage]) -> Callable[[ScriptedWorker], Aimage]:
    """Return ``at(worker)``: the command line configured for a worker."""

    def make(worker: ScriptedWorker) -> Aimage:
        here = aimage()
        here.environment["AIMAGE_HOST"] = worker.host
        return here

    return make


# -- run


def test_run_sends_the_given_options(at: Callable[[ScriptedWorker], Aimage]) -> None:
    with ScriptedWorker(drawing).running() as worker:
        here = at(worker)
        here.environment["AIMAGE_TOKEN"] = "open-sesame"
        options = ("--width", 32, "--height", 48, "--steps", 2, "--seed", 5, "--shift", 3)
        wishes = ("--negative", "no", "--guidance", 1.5)
        more = ("--guidance-end", 0.5, "--cache-threshold", 0.1)
        assert here("run", "team/x:v2", "a fox", *options, *wishes, *more).line == "a-fox-5.png"
    (asked,) = worker.asked
    assert (asked.method, asked.path) == ("POST", GENERATIONS)
    assert asked.headers["Authorization"] == "Bearer open-sesame"
    assert asked.value == {
        "model": "team/x:v2",
        "prompt": "a fox",
        "n": 1,
        "size": "32x48",
        "steps": 2,
        "seed": 5,
        "shift": 3.0,
        "negative_prompt": "no",
        "guidance": 1.5,
        "guidance_end": 0.5,
        "cache_threshold": 0.1,
        "response_format": "b64_json",
        "output_format": "png",
        "png_facts": True,
        "stream": True,
        "stream_format": "ollama",
        "strict": True,
    }


def test_run_omits_options_that_were_not_given(at: Callable[[ScriptedWorker], Aimage]) -> None:
    with ScriptedWorker(drawing).running() as worker:
        said = at(worker)("run", "x", "a fox", "--width", 64)
    asked = worker.asked[0].value
    assert asked["width"] == 64
    omitted = {"size", "height", "steps", "shift", "guidance", "negative_prompt"}
    assert not (omitted | {"guidance_end", "cache_threshold"}) & asked.keys()
    assert f"seed {asked['seed']}" in said.err.splitlines()
    assert f"rendering on the worker at http://{worker.host}" in said.err.splitlines()


def test_run_shows_warnings_that_come_with_the_picture(
    at: Callable[[ScriptedWorker], Aimage],
) -> None:
    def script(asked: Asked) -> Says:
        pieces = [
            piece.replace(b'"data":', b'"warnings": ["no effect"], "data":')
            for piece in drawing(asked).pieces
        ]
        return Says(pieces, headers={"X-Aimage-Warning": "reduced"})

    with ScriptedWorker(script).running() as worker:
        said = at(worker)("run", "x", "a fox", "-n", 2, "-o", "b.png").err.splitlines()
    assert [line for line in said if "warning" in line] == [
        "warning: reduced",
        "warning: no effect",
    ]


def test_run_sends_pictures_and_shows_warnings(at: Callable[[ScriptedWorker], Aimage]) -> None:
    def script(asked: Asked) -> Says:
        return Says(drawing(asked).pieces, headers={"X-Aimage-Warning": "the image is reduced"})

    with ScriptedWorker(script).running() as worker:
        here = at(worker)
        Image.new("L", (40, 24), 200).save(here.home / "a.png")
        control = ("--control", "a.png", "--controlnet", "team/union:v1", "--control-strength", 0.5)
        said = here("run", "x", "a fox", "--seed", 5, "-n", 2, *control, "-o", "b.png")
        image = ("--image", "a.png", "--seed", 5, "-o", "b.png")
        here("run", "x", "a fox", *image, "--expand", "8,0,16,4")
        here("run", "x", "a fox", *image, "--upscale", 2, "--size", "64x64")
        here("run", "x", "a fox", *image, "--mask", "a.png")
        here("run", "x", "a fox", *image, "--image", "a.png", "--size", "64x64")
        url = f"data:;base64,{base64.b64encode((here.home / 'a.png').read_bytes()).decode()}"
    pictures = ("control", "controlnet", "control_strength", "image", "mask", "painted", "expand")
    names = (*pictures, "images", "upscale", "size", "width", "height", "fit")
    sent = [{name: each.value.get(name) for name in names} for each in worker.asked]
    guided = {"control": url, "controlnet": "team/union:v1", "control_strength": 0.5}
    missing = dict.fromkeys(names)
    assert sent == [
        missing | guided,  # without a size, which the worker computes
        missing | guided,
        missing | {"image": url, "expand": [8, 0, 16, 4]},
        missing | {"image": url, "upscale": 2.0, "size": "64x64"},
        missing | {"image": url, "mask": url, "painted": "white"},
        missing | {"images": [url, url], "size": "64x64"},
    ]
    assert said.err.splitlines().count("warning: the image is reduced") == 1


def test_run_writes_the_worker_s_bytes(at: Callable[[ScriptedWorker], Aimage]) -> None:
    with ScriptedWorker(drawing).running() as worker:
        here = at(worker)
        value = here("run", "x", "a fox", "--seed", 5, "--json", "-o", "y").value
    assert (here.home / "y.png").read_bytes() == png(seed=5, prompt="Füchse")
    assert value == {"seed": 5, "prompt": "Füchse", "pictures": [{"path": "y.png", "seed": 5}]}
    assert not list(here.home.glob(".y*"))


def test_several_images_have_rising_seeds_and_one_bar(
    at: Callable[[ScriptedWorker], Aimage],
) -> None:
    with ScriptedWorker(drawing).running() as worker:
        here = at(worker)
        said = here("run", "x", "a fox", "--seed", 5, "-n", 3, "-o", "y.png", "--json")
    assert [asked.value["seed"] for asked in worker.asked] == [5, 6, 7]
    names = ["y-1.png", "y-2.png", "y-3.png"]
    assert [each["path"] for each in said.value["pictures"]] == names
    assert all((here.home / name).is_file() for name in names)
    plans = [json.loads(text) for text in said.err.splitlines() if '"plan"' in text]
    assert plans == [{"event": "plan", "level": "info", "task": "rendering", "steps": 6}]


def test_finished_images_are_kept_when_the_next_one_fails(
    at: Callable[[ScriptedWorker], Aimage],
) -> None:
    def script(asked: Asked) -> Says:
        busy = says({"error": {"message": "2 requests wait"}}, 503, Retry_After="9")
        return drawing(asked) if asked.value["seed"] == 5 else busy

    with ScriptedWorker(script).running() as worker:
        here = at(worker)
        said = here("run", "x", "a fox", "--seed", 5, "-n", 3, code=1)
    assert "2 requests wait\n  try again in 9 seconds" in said.err
    assert [path.name for path in here.home.glob("*.png")] == ["a-fox-5.png"]
    assert len(worker.asked) == 2


def test_a_pull_before_the_image_is_displayed(at: Callable[[ScriptedWorker], Aimage]) -> None:
    pull = [event("pull", {"completed": done, "total": 10}) for done in (0, 4, 10)]

    def script(_: Asked) -> Says:
        return Says([b": keep-alive\n\n", *pull, step(1, 1), done(png())])

    with ScriptedWorker(script).running() as worker:
        said = at(worker)("run", "localhost:1/x", "a fox", "--seed", 1, "--json")
    plans = [json.loads(text) for text in said.err.splitlines() if '"plan"' in text]
    reference = "localhost:1/x:latest"
    assert plans == [
        {"event": "plan", "level": "info", "task": "pulling", "reference": reference, "size": 10},
        {"event": "plan", "level": "info", "task": "rendering", "steps": 1},
    ]
    assert said.value == {"pictures": [{"path": "a-fox-1.png", "seed": 1}]}  # no metadata was sent


@pytest.mark.parametrize(
    ("answer", "code", "text"),
    [
        (says({"error": {"message": "size is odd"}}, 400), 2, "size is odd"),
        (says({"error": {"message": "who?"}}, 401), 4, "AIMAGE_TOKEN"),
        (Says([b"404 page not found"], 404), 1, "answered 404"),
        (Says([event("error", {"error": {"message": "died", "type": "x"}})]), 1, "died"),
        (Says([step(1, 2)]), 1, "disconnected"),
        (Says([done(b"GIF89a")]), 5, "expected a PNG"),
        (Says([event("done", {"data": [{"b64_json": 7}]})]), 5, "expected a PNG"),
        (Says([b"data: {\n\n"]), 5, "invalid response from"),
        (Says([done(png())], headers={"X-Aimage-Model": "other:latest"}), 3, "other:latest"),
    ],
)
def test_a_failing_worker_leaves_no_image(
    at: Callable[[ScriptedWorker], Aimage], answer: Says, code: int, text: str
) -> None:
    with ScriptedWorker(lambda _: answer).running() as worker:
        here = at(worker)
        said = here("run", "x", "a fox", "--seed", 1, code=code)
    assert text in said.err
    assert said.out == ""
    assert not list(here.home.glob("*.png"))
    assert not list(here.home.glob(".x*"))


@pytest.mark.parametrize(
    ("name", "alias", "code"),
    [("x", "x:latest", 0), ("x", "y:latest", 3), ("x", "", 3)],
)
def test_an_alias_of_the_worker_is_accepted(
    at: Callable[[ScriptedWorker], Aimage], name: str, alias: str, code: int
) -> None:
    def script(asked: Asked) -> Says:
        headers = {"X-Aimage-Model": "team/other:v1", "X-Aimage-Alias": alias}
        return Says(drawing(asked).pieces, headers=headers)

    with ScriptedWorker(script).running() as worker:
        here = at(worker)
        here("run", name, "a fox", "--seed", 1, code=code)
    assert [path.name for path in here.home.glob("*.png")] == ([] if code else ["a-fox-1.png"])


@pytest.mark.parametrize(
    "options",
    [
        ("--dtype", "f32"),
        ("--insecure",),
        ("--store", "elsewhere"),
        ("-n", 2000),
        ("--seed", (1 << 64) - 1, "-n", 2),
        ("-o", "x.gif"),
    ],
)
def test_invalid_options_of_run_send_no_request(
    at: Callable[[ScriptedWorker], Aimage], options: tuple[str | int, ...]
) -> None:
    with ScriptedWorker(drawing).running() as worker:
        here = at(worker)
        said = here("run", "x", "a fox", *options, code=2)
        if options[0] == "--store":
            here("--store", "elsewhere", "run", "x", "a fox", code=2)
    assert said.out == ""
    assert not worker.asked


def test_an_interrupt_disconnects_and_writes_nothing(
    at: Callable[[ScriptedWorker], Aimage],
) -> None:
    is_drawing = threading.Event()

    def for_ever() -> Iterator[bytes]:
        while True:
            yield step(1, 9)
            is_drawing.set()

    with ScriptedWorker(lambda _: Says(for_ever())).running() as worker:
        here = at(worker)
        process = here.start("run", "x", "a fox", "--seed", 1, "-q")
        assert is_drawing.wait(60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert worker.left.wait(60)
    assert (process.returncode, out) == (130, "")
    assert "interrupted" in err
    assert not list(here.home.glob("*.png"))


def test_run_is_local_without_a_configured_worker(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    here.environment |= {"AIMAGE_HOST": " ", "AIMAGE_TOKEN": ""}
    assert "in the store" in here("run", "nothing", "a fox", code=3).err


def test_an_unreachable_worker_fails(aimage: Callable[..., Aimage]) -> None:
    here = aimage()
    here.environment["AIMAGE_HOST"] = "127.0.0.1:1"
    for arguments in (
        ("run", "x", "a fox"),
        ("ps",),
        ("stop", "x"),
        ("ls", "--remote"),
        ("rm", "x", "--remote"),
        ("pull", "localhost:1/x", "--remote"),
    ):
        said = here(*arguments, code=1)
        first, second = said.err.splitlines()
        assert (
            first
            == "aimage: cannot connect to the worker at http://127.0.0.1:1: Connection refused"
        )
        assert "aimage serve" in second
    assert not here.store.exists()


@pytest.mark.parametrize("name", ["AIMAGE_HOST", "AIMAGE_TOKEN"])
def test_invalid_variables_are_refused(aimage: Callable[..., Aimage], name: str) -> None:
    here = aimage()
    here.environment |= {"AIMAGE_HOST": "127.0.0.1:1", name: "a b"}
    assert "aimage: " in here("ps", code=2).err


# -- ps, stop


def in_seconds(count: int) -> str:
    return (datetime.now(UTC) + timedelta(seconds=count)).isoformat()


def test_ps_lists_the_names_that_a_model_serves(at: Callable[[ScriptedWorker], Aimage]) -> None:
    loaded = [TINY | {"variants": ["soft:latest", "strong:latest"]}, TINY | {"variants": 3}]
    with ScriptedWorker(lambda _: says({"models": loaded})).running() as worker:
        here = at(worker)
        head, first, second = here("ps").out.splitlines()
        value = here("ps", "--json").value
    assert head.split()[-1] == "VARIANTS"
    assert first.endswith("soft:latest, strong:latest") and second.split()[-1] == "-"
    assert [row["variants"] for row in value] == [["soft:latest", "strong:latest"], []]


def test_ps_lists_loaded_models(at: Callable[[ScriptedWorker], Aimage]) -> None:
    loaded = [
        TINY | {"device": "cpu (openblas)", "expires_at": in_seconds(90)},
        TINY | {"name": "b:1", "details": {"device": "gpu"}, "expires_at": "2400-01-01T00:00:00Z"},
        TINY | {"name": "c:1\x1b[2J", "digest": f"sha512:{DIGEST}", "expires_at": "soon"},
        TINY | {"name": "d:1", "device": 3, "expires_at": in_seconds(-5)},
    ]
    with ScriptedWorker(lambda _: says({"models": loaded})).running() as worker:
        here = at(worker)
        rows = [text.split("  ") for text in here("ps").out.splitlines()]
        rows = [[cell.strip() for cell in row if cell] for row in rows]
        value = here("ps", "--json").value
    assert [asked.path for asked in worker.asked] == ["/api/ps"] * 2
    assert rows[0] == ["NAME", "DIGEST", "SIZE", "DEVICE", "UNTIL", "ADAPTERS"]
    assert rows[1][:4] == ["tiny:latest", DIGEST[:12], "1.2 MB", "cpu (openblas)"]
    assert rows[1][4] in ("in 1:30", "in 1:29", "in 1:28", "in 1:27")
    assert rows[2][3:] == ["gpu", "forever", "-"]
    assert rows[3][0] == "c:1\N{REPLACEMENT CHARACTER}[2J"
    assert rows[3][3:] == ["?", "forever", "-"]
    assert rows[4][3:] == ["?", "in 0:00", "-"]
    assert value[0] == {
        "reference": "tiny:latest",
        "digest": f"sha256:{DIGEST}",
        "size": 1_200_000,
        "device": "cpu (openblas)",
        "adapters": [],
        "variants": [],
        "until": loaded[0]["expires_at"],
    }
    assert [row["until"] for row in value[1:3]] == [None, None]


@pytest.mark.parametrize("verb", ["ps", "ls --remote"])
def test_a_model_with_an_unusable_size_is_left_out_and_said(
    at: Callable[[ScriptedWorker], Aimage], verb: str
) -> None:
    sizes = [10**300, -1, None, 1.5]
    odd = [TINY | {"name": "odd:1", "size": size} for size in sizes]
    odd += [TINY | {"name": "far:1", "expires_at": "9999-12-31T23:59:59-14:00"}]
    with ScriptedWorker(lambda _: says({"models": [*odd, TINY]})).running() as worker:
        done = at(worker)(*verb.split())
    assert "tiny:latest" in done.out and "far:1" in done.out and "odd:1" not in done.out
    assert "left out 4 models that the server at" in done.err


def test_a_size_of_400_digits_is_not_an_answer(at: Callable[[ScriptedWorker], Aimage]) -> None:
    with ScriptedWorker(lambda _: says({"models": [TINY | {"size": 10**400}]})).running() as worker:
        assert "not JSON" in at(worker)("ps", code=5).err


def test_empty_model_lists(at: Callable[[ScriptedWorker], Aimage]) -> None:
    with ScriptedWorker(lambda _: says({"models": []})).running() as worker:
        assert at(worker)("ps").out.split() == [
            *("NAME", "DIGEST", "SIZE", "DEVICE", "UNTIL", "ADAPTERS")
        ]
        assert at(worker)("ls", "--remote", "--json").value == []


@pytest.mark.parametrize(
    "answer",
    [[], {"models": {}}, {"models": [{"name": "x"}]}],
)
def test_an_invalid_list_is_refused(
    at: Callable[[ScriptedWorker], Aimage], answer: list[Any] | dict[str, Any]
) -> None:
    with ScriptedWorker(lambda _: says(answer)).running() as worker:
        here = at(worker)
        for arguments in (("ps",), ("ls", "--remote"), ("rm", "--remote", "x")):
            assert "did not return a list of models" in here(*arguments, code=5).err


def test_stop_unloads_a_model(at: Callable[[ScriptedWorker], Aimage]) -> None:
    with ScriptedWorker(lambda _: says({"done": True})).running() as worker:
        here = at(worker)
        assert here("stop", "tiny").line == "tiny:latest"
        assert here("stop", "tiny:v1", "--json").value == {"stopped": "tiny:v1"}
    first = worker.asked[0]
    assert (first.method, first.path) == ("POST", "/api/generate")
    assert first.value == {"model": "tiny:latest", "prompt": "", "stop": True, "stream": False}


def test_sleep_and_wake_leave_and_load_a_model(at: Callable[[ScriptedWorker], Aimage]) -> None:
    with ScriptedWorker(lambda _: says({"done": True})).running() as worker:
        here = at(worker)
        assert here("sleep", "tiny", "--json").value == {"asleep": "tiny:latest"}
        assert here("wake", "tiny", "--json").value == {"loaded": "tiny:latest"}
    common = {"model": "tiny:latest", "prompt": "", "stream": False}
    assert [asked.value for asked in worker.asked] == [common | {"sleep": True}, common]


def test_stop_of_an_unknown_model_fails(at: Callable[[ScriptedWorker], Aimage]) -> None:
    with ScriptedWorker(lambda _: says({"error": "no x"}, 404)).running() as worker:
        assert "no x" in at(worker)("stop", "x", code=3).err


def test_v_shows_requests_without_the_token(at: Callable[[ScriptedWorker], Aimage]) -> None:
    with ScriptedWorker(lambda _: says({"models": []})).running() as worker:
        here = at(worker)
        here.environment["AIMAGE_TOKEN"] = "hidden"
        line = rf"GET http://{re.escape(worker.host)}/api/ps 200 [0-9]+ ms\n"
        assert re.search(line, here("ps", "-v").err)
        assert "/api/generate 200" in here("stop", "tiny", "-v").err
        headers = here("ps", "-vv").err
    assert "  > Authorization: Bearer ...\n" in headers
    assert "hidden" not in headers
    with ScriptedWorker(lambda _: says({"error": "no"}, 500)).running() as worker:
        assert "/api/ps 500" in at(worker)("ps", "-v", code=1).err


# -- ls, rm, pull


def test_ls_lists_the_worker_s_models(at: Callable[[ScriptedWorker], Aimage]) -> None:
    found = [TINY, TINY | {"name": "a:1", "details": {"family": "z-image"}}]
    with ScriptedWorker(lambda _: says({"models": found})).running() as worker:
        here = at(worker)
        rows = [text.split() for text in here("ls", "--remote").out.splitlines()]
        value = here("ls", "--remote", "--json").value
        assert here("ls", "--json").value == []  # the local store
    assert worker.asked[0].path == "/api/tags"
    assert rows == [
        ["NAME", "FAMILY", "TYPE", "SIZE", "CREATED", "DIGEST"],
        ["a:1", "z-image", "-", "1.2", "MB", "-", DIGEST[:12]],
        ["tiny:latest", "-", "-", "1.2", "MB", "-", DIGEST[:12]],
    ]
    assert value[1] == {
        "reference": "tiny:latest",
        "digest": f"sha256:{DIGEST}",
        "size": 1_200_000,
        "family": None,
        "type": None,
        "created": None,
        "added": None,
    }


def test_rm_removes_the_worker_s_models(at: Callable[[ScriptedWorker], Aimage]) -> None:
    models = {"models": [TINY, TINY | {"name": "a:1"}]}
    with ScriptedWorker(
        lambda asked: says(models) if asked.method == "GET" else Says()
    ).running() as worker:
        here = at(worker)
        assert here("rm", "--remote", "tiny", "a:1").out == "tiny:latest\na:1\n"
        deleted = [asked.value for asked in worker.asked if asked.method == "DELETE"]
        assert deleted == [{"model": "tiny:latest"}, {"model": "a:1"}]
        assert worker.asked[-1].path == "/api/delete"
        assert "b:latest not found" in here("rm", "--remote", "tiny", "b", code=3).err
        assert sum(asked.method == "DELETE" for asked in worker.asked) == 2  # no further request


def pulling(*last: bytes) -> Says:
    other = f"sha256:{'cd' * 32}"
    return Says(
        [
            line(status="pulling manifest"),
            line(status="pulling abab", digest=f"sha256:{DIGEST}", total=10, completed=0),
            line(status="pulling abab", digest=f"sha256:{DIGEST}", total=10, completed=10),
            line(status="pulling cdcd", digest=other, total=5, completed=5),
            line(status="verifying sha256 digest"),
            *last,
        ]
    )


def test_pull_runs_on_the_worker(at: Callable[[ScriptedWorker], Aimage]) -> None:
    name = "localhost:5000/team/x:v1"
    models = {"models": [TINY, TINY | {"name": name, "digest": "ef" * 32}]}

    def script(asked: Asked) -> Says:
        return says(models) if asked.method == "GET" else pulling(line(status="success"))

    with ScriptedWorker(script).running() as worker:
        here = at(worker)
        said = here("pull", "--remote", name)
        assert said.line == f"sha256:{'ef' * 32}"
        assert said.err.splitlines()[-1] == f"pulled by the worker at http://{worker.host}"
        assert here("pull", "--remote", name, "-q").err == ""
        said = here("pull", "--remote", name, "--json")
    assert said.value == {"reference": name, "digest": f"sha256:{'ef' * 32}", "size": 1_200_000}
    assert sizes(said) == [10, 15]
    assert (worker.asked[0].path, worker.asked[0].value) == ("/api/pull", {"model": name})
    assert not here.store.exists()


def sizes(said: Done) -> list[int]:
    """Return the totals that a bar was given."""
    events = [json.loads(text) for text in said.err.splitlines()]
    return [each["size"] for each in events if each["event"] == "plan"]


@pytest.mark.parametrize("size", [{"size": 1000}, {}], ids=["known", "unknown"])
def test_the_total_of_a_worker_s_pull_is_updated_rarely(
    at: Callable[[ScriptedWorker], Aimage], size: dict[str, int]
) -> None:
    blobs = [
        line(digest=str(i), total=10, completed=done, **size)
        for i in range(100)
        for done in (5, 10)
    ]

    def script(asked: Asked) -> Says:
        models = {"models": [TINY | {"name": "localhost:1/x:latest"}]}
        return says(models) if asked.method == "GET" else Says([*blobs, line(status="success")])

    with ScriptedWorker(script).running() as worker:
        told = sizes(at(worker)("pull", "--remote", "localhost:1/x", "--json"))
    if size:
        assert told == [1000]
    else:
        assert len(told) < 40
        assert told == sorted(told)
        assert told[-1] > 900


@pytest.mark.parametrize(
    ("last", "code", "text"),
    [
        (line(error="no such manifest", status=404), 3, "no such manifest"),
        (line(error="log in", status=502, code="registry_unauthorized"), 4, "log in"),
        (line(error="full", status=507, code="insufficient_storage"), 6, "full"),
        (line(status="pulling", digest="x", total="many", completed=None), 1, "disconnected"),
    ],
)
def test_a_failing_pull_on_a_worker_fails(
    at: Callable[[ScriptedWorker], Aimage], last: bytes, code: int, text: str
) -> None:
    with ScriptedWorker(lambda _: pulling(last)).running() as worker:
        said = at(worker)("pull", "--remote", "localhost:5000/x", code=code)
    assert text in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("pull", "--remote", "localhost:1/x", "--jobs", 3),
        ("pull", "--remote", "localhost:1/x", "--dry-run"),
        ("ls", "--remote", "--store", "s"),
        ("rm", "--remote", "--store", "s", "x"),
        ("ps", "--store", "s"),
        ("--store", "s", "ls", "--remote"),
    ],
)
def test_local_options_are_refused_with_a_worker(
    at: Callable[[ScriptedWorker], Aimage], arguments: tuple[str | int, ...]
) -> None:
    with ScriptedWorker(lambda _: says({"models": []})).running() as worker:
        said = at(worker)(*arguments, code=2)
    assert "does not apply to a worker" in said.err
    assert not worker.asked


# -- imports


def test_remote_verbs_import_no_heavy_modules(
    at: Callable[[ScriptedWorker], Aimage], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ScriptedWorker(drawing).running() as worker:
        for name, value in at(worker).env().items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(at(worker).home)
        for arguments in (("run", "x", "a fox"), ("ps",), ("ls", "--remote"), ("stop", "x")):
            modules = imported(*arguments)
            assert "clowder_aimage.engine.worker_client" in modules
            assert not {m for m in modules if m.partition(".")[0] in HEAVY}
    assert len(worker.asked) == 4


def test_a_local_list_does_not_load_a_client(
    aimage: Callable[..., Aimage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIMAGE_HOST", "127.0.0.1:1")
    modules = imported("--store", str(aimage().store), "ls")
    assert "clowder_aimage.layout.layout" in modules
    assert not {"http.client", "clowder_aimage.engine.worker_client"} & modules
