import errno
import io
import threading

import pytest

from dynaquant.store.threads import MOST_BEHIND, WORTH_A_WRITE, WriteBehind


class Slow(io.BytesIO):
    """A file whose first write waits until it is told to go on. threads: the names of those that have written.

    begun: how many writes have begun. waits: is set when the first one has.
    """

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.may_write, self.waits, self.threads, self._fails_at = threading.Event(), threading.Event(), set(), fails_at
        self.begun = 0

    def writelines(self, pieces):
        self.begun += 1
        self.threads.add(threading.current_thread().name)
        if self.begun == 1:
            self.waits.set()
            assert self.may_write.wait(60)
        if self.begun == self._fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().writelines(pieces)


def test_writes_are_in_order_and_return_before_the_file_has_taken_them():
    file = Slow()
    pieces = [bytes([i]) * size for i, size in enumerate([3, WORTH_A_WRITE, 5, WORTH_A_WRITE // 2, WORTH_A_WRITE, 7])]
    with WriteBehind(file) as behind:
        for piece in pieces:
            behind.write(piece)
        assert file.getvalue() == b""
        file.may_write.set()
        behind.flush()
        assert file.getvalue() == b"".join(pieces)
        behind.write(b"end")
        behind.flush()
    assert file.getvalue() == b"".join(pieces) + b"end"


def test_a_small_file_needs_no_thread():
    file = Slow()
    file.may_write.set()
    with WriteBehind(file) as behind:
        for _ in range(100):
            behind.write(b"a few bytes")
        behind.flush()
    assert file.threads == {threading.current_thread().name}


def test_few_bytes_wait():
    file, written = Slow(), []

    def write():
        with WriteBehind(file) as behind:
            for i in range(4 * MOST_BEHIND // WORTH_A_WRITE):
                behind.write(bytes(WORTH_A_WRITE))
                written.append(i)
            behind.flush()

    writer = threading.Thread(target=write)
    writer.start()
    writer.join(0.5)
    assert writer.is_alive()
    assert len(written) <= MOST_BEHIND // WORTH_A_WRITE + 1
    file.may_write.set()
    writer.join(60)
    assert file.tell() == 4 * MOST_BEHIND


@pytest.mark.parametrize("fails_at", [1, 3])
def test_an_error_of_a_write_is_raised_at_the_latest_by_flush(fails_at):
    file = Slow(fails_at)
    file.may_write.set()

    def write():
        with WriteBehind(file) as behind:
            for _ in range(3):
                behind.write(bytes(WORTH_A_WRITE))
            behind.flush()

    with pytest.raises(OSError, match="No space left"):
        write()
    assert file.begun <= 3


def test_a_write_after_one_that_has_failed_raises_its_error():
    file = Slow(fails_at=1)
    file.may_write.set()
    with WriteBehind(file) as behind:
        behind.write(bytes(WORTH_A_WRITE))
        behind._waiting[0][0].exception(60)
        with pytest.raises(OSError, match="No space left"):
            behind.write(bytes(WORTH_A_WRITE))
    assert file.begun == 1


def test_after_an_error_nothing_is_being_written_any_more():
    file, before = Slow(), set(threading.enumerate())

    def write():
        with WriteBehind(file) as behind:
            for _ in range(5):
                behind.write(bytes(WORTH_A_WRITE))
            assert file.waits.wait(60)
            threading.Timer(0.2, file.may_write.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert file.begun == 1
    assert not {thread for thread in threading.enumerate() if thread.name.startswith("dynaquant-write")} - before


def test_when_the_interpreter_ends_bytes_stay_in_order(monkeypatch):
    """It starts no more threads, but what they have begun goes on."""
    file = Slow()
    with WriteBehind(file) as behind:
        behind.write(b"a" * WORTH_A_WRITE)
        assert file.waits.wait(60)

        def refuse(*_):
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

        monkeypatch.setattr(behind._pool, "submit", refuse)
        threading.Timer(0.2, file.may_write.set).start()
        behind.write(b"b" * WORTH_A_WRITE)
        behind.write(b"c" * WORTH_A_WRITE)
        behind.flush()
    assert file.getvalue() == b"".join(letter * WORTH_A_WRITE for letter in (b"a", b"b", b"c"))
