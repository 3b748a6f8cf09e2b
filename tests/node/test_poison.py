"""Neighbours that lie: they are dropped, the model arrives right, and nothing leaks."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from clowder_aimage.layout import ImageLayout
from clowder_aimage.node.range_owner import Patience
from clowder_aimage.oci import Reference
from clowder_aimage.registry.peer import Times
from tests.node.nodes import MIB, TOKEN, Node, fleet, noise, push_model
from tests.proxy import Proxy
from tests.scripted import Answer, ScriptedRegistry

RANGE = 16 * MIB
IDS = ["a" * 32, "b" * 32, "c" * 32, "d" * 32]
LAYERS = [noise(5 * RANGE + 77, "large"), *(noise(5000 + n, f"small {n}") for n in range(6))]
Lie = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


@pytest.fixture(scope="module")
def pushed(registry, tmp_path_factory):
    """A model in the registry."""
    return push_model(tmp_path_factory.mktemp("pushed"), f"{registry.host}/tests/poison", *LAYERS)


def ours(query) -> int:
    """The length of the range that was asked for."""
    return min(int(query["size"]) - int(query["range"]) * RANGE, RANGE)


def told(data: bytes) -> dict[str, str]:
    digest = base64.b64encode(hashlib.sha256(data).digest()).decode()
    return {"Content-Digest": f"sha-256=:{digest}:"}


def lying(lie: Lie, *, small: bool = True, large: bool = True):
    """``lie`` in answer to whoever asks for a range."""

    async def before(request):
        if "/blobs/" not in request.path:
            return None
        is_small = int(request.query["size"]) < RANGE
        return await lie(request) if (small if is_small else large) else None

    return before


def check_right(node: Node, reference: Reference) -> None:
    """All that a node has is what it should be."""
    stored = ImageLayout(node.layout.root)
    manifest = stored.read(stored.resolve(reference))
    sizes = [layer["size"] for layer in json.loads(manifest)["layers"]]
    assert sizes == [len(layer) for layer in LAYERS]
    for path in node.layout.root.glob("blobs/sha256/*"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
    assert not list(node.layout.root.glob(".aimage/ingest/*"))


def pull_from(liars, tmp_path, reference, honest=0, **options):
    """Pull with neighbours that lie, and others that do not. The node, and the liars."""
    with fleet(tmp_path, 1 + honest + len(liars), ids=IDS, **options) as nodes:
        victim, others = nodes[0], nodes[1 + honest :]
        for node, before in zip(others, liars, strict=True):
            node.before = before
        victim.pull(reference)
        check_right(victim, reference)
        for other in others:
            assert other.blob_requests(), "the liar was never asked"
        return victim, nodes[1 : 1 + honest], others


async def wrong_digest(request):
    return web.Response(body=bytes(ours(request.query)), headers=told(b"something else"))


async def no_digest(request):
    return web.Response(body=bytes(ours(request.query)))


async def two_digests(request):
    answer = web.Response(body=bytes(ours(request.query)), headers=told(b"one"))
    answer.headers.add("Content-Digest", told(b"two")["Content-Digest"])
    return answer


async def too_short(request):
    data = bytes(ours(request.query) - 1)
    return web.Response(body=data, headers=told(data))


async def too_long(request):
    data = bytes(ours(request.query) + 1)
    return web.Response(body=data, headers=told(data))


async def endless(request):
    answer = web.StreamResponse(headers=told(b""))
    answer.enable_chunked_encoding()
    await answer.prepare(request)
    for _ in range(1000):
        await answer.write(bytes(MIB))
    return answer


async def packed(request):
    data = bytes(ours(request.query))
    headers = told(data) | {"Content-Encoding": "gzip"}
    return web.Response(body=data, headers=headers)


async def part_of_it(request):
    return web.Response(status=206, body=bytes(ours(request.query)))


async def wants_credentials(_):
    realm = 'Basic realm="http://169.254.169.254/"'
    return web.Response(status=401, headers={"WWW-Authenticate": realm})


async def forbids(_):
    return web.Response(status=403)


async def talks_on(_):
    return web.Response(status=503, body=b'{"code": "busy", "x": "' + b"x" * (4 * MIB) + b'"}')


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (wrong_digest, "wrong digest"),
        (no_digest, "wrong digest"),
        (two_digests, "wrong digest"),
        (too_short, "wrong size"),
        (too_long, "wrong size"),
        (endless, "wrong size"),
        (packed, "wrong size"),
        (wants_credentials, "credentials"),
        (forbids, "credentials"),
        (talks_on, "nonsense"),
    ],
)
def test_a_neighbour_that_lies_is_banned_and_the_model_arrives(tmp_path, pushed, lie, reason):
    victim, _, (liar,) = pull_from([lying(lie)], tmp_path, pushed)
    assert victim.bans == [(f"http://{liar.address}", reason)]


def test_wrong_bytes_of_a_small_blob_are_seen_at_once(tmp_path, pushed):
    async def other_bytes(request):
        data = bytes(ours(request.query))
        return web.Response(body=data, headers=told(data))

    victim, _, (liar,) = pull_from([lying(other_bytes, large=False)], tmp_path, pushed)
    assert victim.bans == [(f"http://{liar.address}", "wrong bytes")]


def test_wrong_bytes_of_a_large_blob_ban_the_liar_and_nobody_else(tmp_path, registry, pushed):
    async def other_bytes(request):
        data = bytes(ours(request.query))
        return web.Response(body=data, headers=told(data))

    with Proxy(registry.host).running() as proxy, fleet(tmp_path, 3, ids=IDS) as nodes:
        victim, honest, liar = nodes
        liar.before = lying(other_bytes, small=False)
        reference = Reference(proxy.host, pushed.repository, pushed.tag)
        victim.pull(reference)
        check_right(victim, reference)
        victim.wait_until(lambda: victim.bans)
        assert victim.bans == [(f"http://{liar.address}", "wrong bytes")]
        large = [url for url, _ in honest.blob_requests() if f"size={len(LAYERS[0])}" in url]
        assert large, "the honest one had no part in it"
        states = {each["url"]: each["state"] for each in victim.sharing.states()}
        assert states[f"http://{honest.address}"] == "live"
        assert proxy.sent() < 2 * len(LAYERS[0]) + 2 * MIB


def test_a_redirect_is_not_followed(tmp_path, pushed):
    with ScriptedRegistry(lambda _: Answer(200)).running() as elsewhere:

        async def redirects(_):
            return web.Response(status=307, headers={"Location": f"http://{elsewhere.host}/"})

        victim, _, (liar,) = pull_from([lying(redirects)], tmp_path, pushed)
        assert victim.bans == [(f"http://{liar.address}", "redirect")]
        assert not elsewhere.seen


def test_holders_that_are_addresses_are_nobody(tmp_path, pushed):
    with ScriptedRegistry(lambda _: Answer(200)).running() as elsewhere:

        async def names_hosts(request):
            if request.query.get("again"):
                return None
            holders = ["169.254.169.254", f"http://{elsewhere.host}", "/etc/passwd", 7, None]
            value = {"code": "busy", "holders": holders, "digest": "sha256:" + "0" * 64}
            return web.json_response(value, status=503)

        patience = Patience(busy=0.2, pause=0.05)
        pull_from([lying(names_hosts)], tmp_path, pushed, patience=patience)
        assert not elsewhere.seen


def test_a_holder_must_give_what_the_home_says(tmp_path, pushed):
    holder_id = IDS[1]
    asked = []

    async def says_its_own(request):
        if "held" not in request.query:
            return None
        asked.append(request.query["held"])
        data = bytes(ours(request.query))
        return web.Response(body=data, headers=told(data))

    async def names_the_holder(request):
        if "here" in request.query:
            return None
        data = LAYERS[0][int(request.query["range"]) * RANGE :][: ours(request.query)]
        value = {
            "code": "busy",
            "holders": [holder_id],
            "digest": f"sha256:{hashlib.sha256(data).hexdigest()}",
        }
        return web.json_response(value, status=503)

    liars = [lying(says_its_own), lying(names_the_holder, small=False)]
    patience = Patience(busy=0.2, pause=0.05)
    victim, _, (holder, _) = pull_from(liars, tmp_path, pushed, patience=patience)
    assert asked
    assert victim.bans == [(f"http://{holder.address}", "wrong digest")]


@pytest.mark.parametrize(
    "holders", [[], [IDS[1]], [IDS[0]], [IDS[2]], ["f" * 32], [7, None, "http://127.0.0.1:9"], 100]
)
def test_one_that_names_others_who_have_nothing_costs_a_question_or_two(tmp_path, pushed, holders):
    """IDS[0] is who asks, IDS[1] the liar, IDS[2] one that has nothing to give."""

    async def points_away(_):
        named = [f"{number:032x}" for number in range(holders)] if holders == 100 else holders
        return web.json_response({"code": "elsewhere", "holders": named}, status=404)

    async def has_nothing(_):
        return web.json_response({"code": "not_here"}, status=404)

    liars = [lying(points_away), lying(has_nothing)]
    victim, _, others = pull_from(liars, tmp_path, pushed)
    assert victim.bans == []
    ranges = sum(-(-len(layer) // RANGE) for layer in LAYERS)
    for other in others:
        assert len(other.blob_requests()) <= 4 * ranges


def test_one_that_is_always_busy_is_left_alone(tmp_path, pushed):
    async def busy(_):
        return web.json_response({"code": "busy", "come": 0}, status=503)

    patience = Patience(busy=0.1, pause=0.02)
    _victim, _, (liar,) = pull_from([lying(busy)], tmp_path, pushed, patience=patience)
    asked = len(liar.blob_requests())
    assert 0 < asked < 200


@pytest.mark.parametrize("is_last", [False, True])
def test_a_body_that_drips_is_given_up(tmp_path, pushed, is_last):
    ended = asyncio.Event()

    async def drips(request):
        answer = web.StreamResponse(headers=told(b""))
        answer.content_length = ours(request.query)
        if is_last:
            answer.force_close()
        await answer.prepare(request)
        for _ in range(10_000):
            await answer.write(b"x")
            await asyncio.sleep(0.02)
            if ended.is_set():
                break
        return answer

    _victim, _, (liar,) = pull_from(
        [lying(drips)], tmp_path, pushed, times=Times(life=3, range=0.5, stall=10)
    )
    ended.set()
    assert len(liar.blob_requests()) < 20


def test_an_answer_that_breaks_off_is_no_lie(tmp_path, pushed):
    async def breaks_off(request):
        answer = web.StreamResponse(headers=told(b""))
        answer.content_length = ours(request.query)
        await answer.prepare(request)
        await answer.write(bytes(answer.content_length // 2))  # the last range is a short one
        request.transport.abort()
        return answer

    victim, _, _ = pull_from([lying(breaks_off)], tmp_path, pushed)
    assert not victim.bans


def test_only_the_nodes_own_token_is_sent_and_only_to_them(tmp_path, pushed):
    _victim, _, (liar,) = pull_from([lying(wants_credentials)], tmp_path, pushed)
    for _, headers in liar.seen:
        assert headers["Authorization"] == f"Bearer {TOKEN}"
        assert not {"Cookie", "Proxy-Authorization"} & set(headers)
