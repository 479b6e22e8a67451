"""Several tensors at a time: results in order, threads that do not wait for a slow item, and limited memory."""

from threading import Event

import pytest

from dynaquant.store import threads as module
from dynaquant.store.threads import in_order


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 500])
def test_results_come_in_the_order_of_the_items(threads, count):
    assert list(in_order(lambda item: item * item, range(count), threads)) == [n * n for n in range(count)]


def test_other_threads_go_on_while_one_has_a_slow_item():
    last = Event()

    def work(item):
        if item == 0:
            assert last.wait(60), "the thread of the other items has stopped"
        elif item == 30:
            last.set()
        return item

    assert list(in_order(work, range(31), 2)) == list(range(31))


def test_few_results_wait_if_they_are_large(monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    begun, first = [], Event()

    def work(item):
        begun.append(item)
        if item == 0:
            first.wait(0.5)
        return item

    found = in_order(work, range(100), 2, lambda _: 400)
    assert next(found) == 0
    assert len(begun) < 12  # three results wait, and each of two threads has another item, and one in its queue
    assert list(found) == list(range(1, 100))


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_of_an_item_comes_after_the_results_before_it(threads):
    found = in_order(lambda item: 1 // (item - 5), range(100), threads)
    assert [next(found) for _ in range(5)] == [1 // (item - 5) for item in range(5)]
    with pytest.raises(ZeroDivisionError):
        next(found)
