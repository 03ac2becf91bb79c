"""Work in a child process: what it may take, how it ends, and that the next call is served."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from operator import truediv

import pytest

from edgespec.contained import Child, ChildEnded, Containment, Overrun


@pytest.fixture(scope="module")
def children() -> Iterator[Containment]:
    made = Containment("math", most=2, limit_s=60.0)
    yield made
    made.close()


def test_a_result_and_an_error_come_back(children: Containment) -> None:
    assert children.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError, match="division"):
        children.run(truediv, 1, 0)


def test_whatever_ends_a_child_costs_one_call(children: Containment) -> None:
    with pytest.raises(Overrun, match="ends the process"):
        children.run(ctypes.string_at, 0)
    with pytest.raises(Overrun, match="exit code 3"):
        children.run(os._exit, 3)
    with pytest.raises(Overrun, match="512 MiB of memory"):
        children.run(bytes, 4 << 30)
    assert children.run(len, "abc") == 3
    hurried = Containment("math", most=1, limit_s=1.0)
    with pytest.raises(Overrun, match=r"too long|more than"):
        hurried.run(sum, range(10**15))
    hurried.close()


def test_a_child_that_died_while_it_had_nothing_to_do_is_told() -> None:
    """What it is sent cannot be written: that must end the thread that waits for it, and not be lost with it."""
    with Child("math") as child:
        assert child.call(abs, -1) == 1
        child._process.kill()
        child._process.wait()
        with pytest.raises(ChildEnded):
            child.call(abs, -2, limit_s=60)


def test_more_calls_than_children_wait_for_each_other(children: Containment) -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda n=n: found.append(children.run(abs, -n))) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == list(range(6))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is of POSIX")
def test_a_fork_has_children_of_its_own(children: Containment) -> None:
    assert children.run(len, "ab") == 2
    forked = os.fork()
    if forked == 0:
        os._exit(children.run(len, "abc"))
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 3
    assert children.run(len, "ab") == 2
