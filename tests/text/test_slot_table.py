from __future__ import annotations

from clowder_aimage.model.llama.slot_table import SlotTable


def test_a_slot_is_used_again_by_the_client_of_its_prompt() -> None:
    slots = SlotTable(3)

    def use(owner: str, prompt: str) -> tuple[int, bool] | None:
        taken = slots.take(owner, prompt)
        if taken is not None:
            slots.release(taken[0])
        return taken

    assert use("a", "the red ball") == (0, False)
    assert use("b", "the red ball") == (1, False)
    assert use("a", "the red ball is") == (0, True)
    assert use("a", "x") == (2, False)
    assert use("a", "the red cube") == (0, True)
    assert use("c", "the red cube") == (1, False)  # the oldest one
    assert use("b", "the red ball") == (2, False)


def test_slots_that_are_taken_are_not_shared() -> None:
    slots = SlotTable(2)
    assert slots.take("a", "text") == (0, False)
    assert slots.take("a", "text") == (1, False)
    assert slots.take("a", "text") is None
    slots.release(1)
    assert slots.take("a", "text") == (1, True)
