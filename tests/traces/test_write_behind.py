"""Writes that happen behind the caller's back happen in order, all of them or none after the first that fails."""

import threading
from functools import partial

import pytest

from rocktokens.traces.writer import WriteBehind


def fail() -> None:
    raise OSError("no room")


def test_writes_run_in_order_and_elsewhere():
    written: list[tuple[int, int]] = []
    with WriteBehind() as behind:
        for number in range(20):
            behind.put(lambda number=number: written.append((number, threading.get_ident())))
    assert [number for number, _ in written] == list(range(20))
    assert {thread for _, thread in written} == {written[0][1]} != {threading.get_ident()}


def test_one_runs_and_two_wait_and_the_next_is_held_back():
    gate, written = threading.Event(), []

    def write(number: int) -> None:
        gate.wait()
        written.append(number)

    with WriteBehind() as behind:
        for number in range(3):
            behind.put(partial(write, number))
        held = threading.Thread(target=behind.put, args=(partial(write, 3),))
        held.start()
        held.join(0.1)
        assert held.is_alive() and written == []
        gate.set()
        held.join()
    assert written == [0, 1, 2, 3]


def test_nothing_is_written_after_a_write_that_failed_and_the_caller_hears_of_it():
    gate, written = threading.Event(), []

    def fail_late() -> None:
        gate.wait()
        fail()

    with pytest.raises(OSError, match="no room"), WriteBehind() as behind:
        behind.put(partial(written.append, 0))
        behind.put(fail_late)
        behind.put(partial(written.append, 2))
        gate.set()
        for number in range(3, 100):
            behind.put(partial(written.append, number))
    assert written == [0]


def test_waiting_for_all_and_asking_for_failures_only():
    gate, written = threading.Event(), []
    with pytest.raises(OSError, match="no room"), WriteBehind(waiting=0) as behind:
        behind.put(lambda: (gate.wait(), written.append(0)))
        behind.require_sound()
        assert written == []
        gate.set()
        behind.put(lambda: written.append(1))
        assert written[0] == 0, "with none waiting, the next is put when the one before it is done"
        behind.wait()
        assert written == [0, 1]
        behind.put(fail)
        while True:
            behind.require_sound()


def test_a_failure_of_the_last_write_is_raised_at_the_end():
    with pytest.raises(OSError, match="no room"), WriteBehind() as behind:
        behind.put(fail)


def test_what_was_put_is_written_though_the_block_raises():
    gate, written = threading.Event(), []

    def write(number: int) -> None:
        gate.wait()
        written.append(number)

    with pytest.raises(KeyboardInterrupt), WriteBehind() as behind:
        for number in range(3):
            behind.put(partial(write, number))
        gate.set()
        raise KeyboardInterrupt
    assert written == [0, 1, 2]


def test_the_blocks_own_error_comes_first():
    with pytest.raises(ZeroDivisionError), WriteBehind() as behind:
        behind.put(fail)
        raise ZeroDivisionError
