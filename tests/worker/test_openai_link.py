"""Links to pictures: signature, expiry and limits."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest

from clowder_aimage.api.picture.link import PATH, ExpiredError, LinkedPicture, PictureLinks
from clowder_aimage.errors import NotFoundError


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def parts(url: str) -> tuple[str, str, str]:
    found = urlsplit(url)
    query = parse_qs(found.query)
    return found.path.removeprefix(PATH), query["expires"][0], query["signature"][0]


def find(pictures: PictureLinks, url: str) -> LinkedPicture:
    return pictures.find(*parts(url))


def is_kept(pictures: PictureLinks, url: str) -> bool:
    try:
        find(pictures, url)
    except ExpiredError:
        return False
    return True


def test_a_link_returns_the_picture_for_an_hour() -> None:
    clock = Clock()
    pictures = PictureLinks(clock=clock)
    url = pictures.keep(b"picture", "webp")
    assert (find(pictures, url).data, find(pictures, url).media_type) == (b"picture", "image/webp")
    clock.now += 3599
    assert find(pictures, url).data == b"picture"
    clock.now += 1
    with pytest.raises(ExpiredError):
        find(pictures, url)
    assert pictures.size == 0


def test_equal_pictures_have_different_links() -> None:
    pictures = PictureLinks()
    assert len({pictures.keep(b"same", "png") for _ in range(50)}) == 50


def test_a_modified_link_is_not_found() -> None:
    clock = Clock()
    pictures = PictureLinks(clock=clock)
    name, expires, signature = parts(pictures.keep(b"one", "png"))
    other, _, _ = parts(pictures.keep(b"two", "png"))
    for wrong in (
        (other, expires, signature),
        (name, str(int(expires) + 1), signature),
        (name, "+" + expires, signature),
        (name, " " + expires, signature),
        (name, "９" + expires, signature),
        (name, "", signature),
        (name, "9" * 5000, signature),
        (name, expires, ""),
        (name, expires, signature[:-1]),
        (name, expires, signature.upper()),
        (name, expires, "é"),
        (name, expires, "\udc80"),
        ("\udc80", expires, signature),
        ("../" + name, expires, signature),
    ):
        with pytest.raises(NotFoundError) as caught:
            pictures.find(*wrong)
        assert not isinstance(caught.value, ExpiredError)
    assert pictures.find(name, expires, signature).data == b"one"


def test_a_link_of_another_worker_is_not_found() -> None:
    with pytest.raises(NotFoundError, match="picture not found"):
        find(PictureLinks(), PictureLinks().keep(b"one", "png"))


def test_the_oldest_picture_is_dropped_beyond_the_count_limit() -> None:
    pictures = PictureLinks(max_pictures=2)
    urls = [pictures.keep(b"picture", "png") for _ in range(3)]
    assert [is_kept(pictures, url) for url in urls] == [False, True, True]


def test_the_oldest_pictures_are_dropped_beyond_the_size_limit() -> None:
    pictures = PictureLinks(max_bytes=10)
    urls = [pictures.keep(data, "png") for data in (b"1234", b"1234", b"12345678")]
    assert [is_kept(pictures, url) for url in urls] == [False, False, True]
    assert pictures.size == 8


def test_purge_drops_expired_pictures() -> None:
    clock = Clock()
    pictures = PictureLinks(clock=clock)
    pictures.keep(b"picture", "png")
    clock.now += 3600
    pictures.purge()
    assert len(pictures) == 0
