"""``aimage picture``, and pictures that ``aimage run`` marks and signs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("c2pa", reason="c2pa is not installed")

from PIL import Image

from clowder_aimage.model.picture_mark import COMPOSITE, GENERATED
from clowder_aimage.model.picture_metadata import read_metadata
from clowder_aimage.pictures.provenance.marking import read_mark
from tests.process import Aimage
from tests.provenance.signing import Authority, authority, get_store, with_stores

DRAW = ("run", "x", "a fox", "--steps", 1, "--seed", 3, "--size", "32x32", "--local")


@pytest.fixture
def signing(stocked: Callable[[], Aimage]) -> Aimage:
    """Return a command line whose configuration has a key."""
    here = stocked()
    settings = authority().issue(here.home)
    section = {"chain": Path(settings.chain).name, "key": settings.key}
    (here.home / "config.json").write_text(json.dumps({"picture": {"signing": section}}))
    (here.home / "roots.pem").write_text(authority().pem)
    here.environment["AIMAGE_CONFIG"] = str(here.home / "config.json")
    return here


def test_a_signed_picture_is_verified_and_made_again(signing: Aimage) -> None:
    here = signing
    here(*DRAW, "-o", "fox.png")
    here("replay", "fox.png")
    done = here("picture", "verify", "fox.png", "--trust", "roots.pem", "--replay", "--json")
    found = json.loads(done.out)
    assert [(one["check"], one["passed"]) for one in found["checks"]] == [
        ("signature", True),
        ("trust", True),
        ("replay", True),
    ]
    assert found["signature"]["generation"]["seed"] == "3"
    shown = json.loads(here("picture", "show", "fox.png", "--json").out)
    assert shown["mark"]["digitalSourceType"] == GENERATED
    assert (shown["signature"]["valid"], shown["signature"]["trusted"]) == (True, None)
    assert shown["metadata"]["prompt"] == "a fox"
    text = here("picture", "show", "fox.png").out
    assert "trainedAlgorithmicMedia" in text and "'Test pictures' of 'Tests'" in text
    # The metadata may be gone: the signature has them
    file = here.home / "fox.png"
    assert read_metadata(file.read_bytes())


def test_pictures_that_are_not_what_was_signed_end_with_5(signing: Aimage) -> None:
    here = signing
    (here.home / "other.pem").write_text(Authority.make("Other").pem)
    here(*DRAW, "-o", "fox.png")
    here(*DRAW, "--no-sign", "-o", "plain.png")
    data, plain = ((here.home / name).read_bytes() for name in ("fox.png", "plain.png"))
    assert with_stores(data) == plain  # the signature alone differs
    (here.home / "changed.png").write_bytes(
        with_stores(plain.replace(b"a fox", b"a dog"), get_store(data))
    )
    (here.home / "twice.png").write_bytes(with_stores(plain, *[get_store(data)] * 2))
    for name, words in {
        "plain.png": "signature: the picture is not signed",
        "changed.png": "signature: not valid: assertion.dataHash.mismatch",
        "twice.png": "signature: it has 2 manifests, of which none counts",
    }.items():
        assert words in here("picture", "verify", name, code=5).out
        here("picture", "show", name)
    done = here("picture", "verify", "fox.png", "--trust", "other.pem", code=5)
    assert "trust: no root vouches for 'Test pictures'" in done.out


def test_a_replay_of_another_picture_ends_with_5(signing: Aimage) -> None:
    """The signature is right, and the claim is not."""
    from clowder_aimage.model.picture import encode_picture, read_picture
    from tests.provenance.signing import MARK, open_signer

    here = signing
    here(*DRAW, "--no-sign", "-o", "fox.png")
    read = read_picture((here.home / "fox.png").read_bytes(), "it")
    pixels = read.pixels.copy()
    pixels[0, 0, 0] ^= 128
    forged = encode_picture(pixels, read.metadata, mark=MARK)
    (here.home / "keys").mkdir()
    signed = open_signer(here.home / "keys").sign(forged, "png", MARK, (), read.metadata)
    (here.home / "forged.png").write_bytes(signed)
    here("picture", "verify", "forged.png")
    done = here("picture", "verify", "forged.png", "--replay", code=5)
    assert "replay: differs: by up to 128/255" in done.out


def test_a_replay_pulls_nothing_unless_it_may(signing: Aimage) -> None:
    here = signing
    here("tag", "x", "localhost:1/team/x")
    draw = ("run", "localhost:1/team/x", *DRAW[2:])
    here(*draw, "-o", "fox.png")
    here("rm", "localhost:1/team/x", "x")
    (here.home / "empty").mkdir()
    empty = Aimage(here.home, here.home / "empty", here.environment)
    done = empty("picture", "verify", "fox.png", "--replay", code=3)
    assert "the store lacks the model" in done.err and "--pull" in done.err
    assert empty("picture", "verify", "fox.png", "--replay", "--pull", code=1).err
    assert "require --replay" in empty("picture", "verify", "fox.png", "--pull", code=2).err


def test_the_mark_is_turned_off_visibly(signing: Aimage) -> None:
    here = signing
    here(*DRAW, "--no-mark", "-o", "fox.webp")
    data = (here.home / "fox.webp").read_bytes()
    assert read_mark(data, "it") is None and not get_store(data)
    assert "turned off when the picture was made" in here("picture", "show", "fox.webp").out
    assert json.loads(here("picture", "show", "fox.webp", "--json").out)["markTurnedOff"]
    assert here("replay", "fox.webp").out.startswith("equal")


def test_an_edit_keeps_the_signature_of_its_picture_or_says_that_it_is_lost(
    signing: Aimage,
) -> None:
    here = signing
    here(*DRAW, "-o", "fox.png")
    edit = (*DRAW, "--image", "fox.png", "--strength", 0.9)
    assert "does not keep" not in here(*edit, "-o", "edited.jpg").err
    (entry,) = json.loads(here("picture", "show", "edited.jpg", "--json").out)["signature"][
        "inputs"
    ]
    assert (entry["relationship"], entry["signer"]) == ("parentOf", "Test pictures")
    done = here(*edit, "--no-sign", "-o", "lost.png")
    assert "the image has a signed manifest (C2PA), which the result does not keep" in done.err
    assert read_mark((here.home / "lost.png").read_bytes(), "it") is not None


def test_a_key_that_cannot_be_used_is_refused_before_the_model_is_loaded(signing: Aimage) -> None:
    here = signing
    (here.home / "signer.key").write_text("no key")
    done = here(*DRAW, "-o", "fox.png", code=2)
    assert "signer.key is not a private key that can be used" in done.err
    here(*DRAW, "--no-sign", "-o", "fox.png")


def test_a_picture_of_another_program_is_shown(signing: Aimage) -> None:
    here = signing
    Image.new("RGB", (8, 4)).save(here.home / "plain.jpg")
    shown = json.loads(here("picture", "show", "plain.jpg", "--json").out)
    assert shown == {
        "picture": "plain.jpg",
        "format": "jpeg",
        "width": 8,
        "height": 4,
        "mark": None,
        "markTurnedOff": False,
        "signature": None,
        "metadata": {},
    }
    assert "programs cannot tell" in here("picture", "show", "plain.jpg").out
    here(*DRAW, "--image", "plain.jpg", "-o", "edited.png")
    mark = read_mark((here.home / "edited.png").read_bytes(), "it")
    assert mark is not None and mark.source_type == COMPOSITE
    for arguments, code in ((("show", "absent.png"), 3), (("show", "config.json"), 2)):
        here("picture", *arguments, code=code)
    for roots in ("absent.pem", "config.json"):
        here("picture", "verify", "edited.png", "--trust", roots, code=2)


def test_the_configuration_shows_the_name_of_the_key_alone(signing: Aimage) -> None:
    out = signing("config", "show").out
    assert "picture.signing.key" in out and "signer.key" in out and "PRIVATE" not in out
