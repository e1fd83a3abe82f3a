"""What a signal does, and who may work in a folder."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from sim.stopping import Claim, Terminated, unwinding, working_for
from workloads.errors import UserError


@pytest.fixture(autouse=True)
def audible(monkeypatch: pytest.MonkeyPatch) -> object:
    """Tests that run in the background ignore SIGINT."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


def test_each_signal_unwinds_and_the_handlers_are_put_back() -> None:
    former = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt) as interrupt, unwinding():
        signal.raise_signal(signal.SIGINT)
    assert interrupt.type is KeyboardInterrupt
    with pytest.raises(Terminated), unwinding():
        signal.raise_signal(signal.SIGTERM)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == former


def test_a_signal_that_is_passed_on_twice_counts_once_and_another_one_later_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt), unwinding(lambda: said.append("before")):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
            said.append("wound up")
            monkeypatch.setattr("sim.stopping.SAME_S", 0.0)
            signal.raise_signal(signal.SIGINT)
            said.append("not reached")
    assert said == ["before", "wound up"]


def test_an_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with unwinding():
        signal.raise_signal(signal.SIGINT)


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            with unwinding():
                pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert errors == []


def test_a_worker_is_interrupted_when_the_sweep_stops(tmp_path: Path) -> None:
    claim = Claim(tmp_path)
    over = threading.Event()

    def stop() -> None:
        claim.stop_workers()  # returns once the worker has left
        over.set()

    with pytest.raises(KeyboardInterrupt), working_for(tmp_path):
        stopper = threading.Thread(target=stop)
        stopper.start()
        while not over.is_set():
            time.sleep(0.01)
    stopper.join(60)
    assert over.is_set()
    # A worker that comes late finds the word too; it would wait for the claim to be dropped first.
    claim.drop()
    with pytest.raises(KeyboardInterrupt), working_for(tmp_path):
        pytest.fail("began to work")


def test_a_claim_waits_for_the_workers_of_a_sweep_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.stopping.CLAIM_S", 0.1)
    with working_for(tmp_path), pytest.raises(UserError, match="another sweep is at work"):
        Claim(tmp_path)
    Claim(tmp_path).drop()


def test_a_new_claim_takes_back_the_word_to_stop(tmp_path: Path) -> None:
    claim = Claim(tmp_path)
    claim.stop_workers()
    claim.drop()
    Claim(tmp_path).drop()
    with working_for(tmp_path):
        pass
