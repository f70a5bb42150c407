"""Memory that is reused only once no view refers to it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import torch

from hplm.adapters.buffers import MOST_FREE, Buffers


def address_of(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_given_out_again_when_the_last_view_of_it_is_gone() -> None:
    buffers = Buffers((3, 5), np.uint16)
    taken = buffers.take()
    assert taken.shape == (3, 5)
    assert taken.dtype == np.uint16
    taken[:] = 7
    where, row = address_of(taken), taken[1]
    tensor = torch.from_numpy(taken)[2].view(torch.bfloat16)
    for holder in ("array", "row", "tensor"):
        other = buffers.take()
        assert address_of(other) != where, f"given out again while its {holder} is there"
        other[:] = 9
        if holder == "array":
            del taken
        elif holder == "row":
            assert row.tolist() == [7] * 5
            del row
    assert tensor.view(torch.uint16).tolist() == [7] * 5
    del tensor
    assert where in {address_of(one) for one in [buffers.take() for _ in range(4)]}


def test_no_two_threads_are_given_the_same_memory() -> None:
    buffers = Buffers((64,), np.uint16)
    wrong: list[int] = []

    def use(number: int) -> None:
        for _ in range(300):
            own = [buffers.take() for _ in range(3)]
            for array in own:
                array[:] = number
            wrong.extend(number for array in own if not (array == number).all())

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_only_so_much_is_kept() -> None:
    buffers = Buffers((4096,), np.uint16)
    many = [buffers.take() for _ in range(3 * MOST_FREE)]
    many.clear()
    again = [buffers.take() for _ in range(3 * MOST_FREE)]
    assert len({address_of(one) for one in again}) == 3 * MOST_FREE
    assert len(buffers._free) == 0


def test_many_that_are_held_take_few_of_the_kernels_mappings() -> None:
    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    buffers = Buffers((4096,), np.uint16)
    before = mappings()
    held = [buffers.take() for _ in range(500)]
    assert mappings() - before < 50
    assert len({address_of(one) for one in held}) == 500
