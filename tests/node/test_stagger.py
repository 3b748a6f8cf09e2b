"""Nodes that begin to want a model one after the other: the registry still sends it once."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from clowder_aimage.oci import Reference
from tests.node.nodes import MIB, all_at_once, fleet, noise, push_model
from tests.proxy import Proxy


@pytest.fixture
def proxy(registry):
    with Proxy(registry.host, pace=20 * MIB).running() as found:
        yield found


NODES = 5


def test_nodes_that_hear_of_a_model_one_after_the_other_have_it_sent_once(
    tmp_path, repository, proxy
):
    sizes = [40 * MIB] * 3 + [3 * MIB] * 4
    layers = [noise(size, f"{tmp_path} {number}") for number, size in enumerate(sizes)]
    pushed = push_model(tmp_path, repository, *layers)
    reference = Reference(proxy.host, pushed.repository, pushed.tag)
    size = sum(sizes)
    with fleet(tmp_path, NODES) as nodes:
        for node in nodes:
            node.takes_part = False  # it is told of the model later than others
        hears = [threading.Event() for _ in nodes]

        def play(number):
            assert hears[number].wait(60)
            nodes[number].takes_part = True
            return nodes[number].pull(reference)

        def tell():
            for number, each in enumerate(hears):
                proxy.wait_until(lambda number=number: proxy.sent() >= size * number / NODES)
                each.set()

        done = all_at_once([tell, *(partial(play, number) for number in range(NODES))])
    assert len({root for root, _ in done[1:]}) == 1
    assert size <= proxy.sent() <= 1.05 * size
