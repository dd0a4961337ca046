"""The awake wait: it must find the time a forward takes, follow it, and not run away."""

import random

from harness.spin import ASLEEP_S, UP, Spin


class Machine:
    """A clock, and a device whose forwards take `seconds`, with jitter, and whose sleepers wake late."""

    def __init__(self, seconds, wake=40e-6, jitter=0.01, call=3e-6, issue=0.0, disturbed=0.0):
        self.now = self.ran = 0.0
        self.seconds, self.wake, self.jitter = seconds, wake, jitter
        self.call, self.issue = call, issue  # what the wait itself runs for, and what comes before it
        self.disturbed = disturbed  # the share of waits that sleep 30 µs more, ready or not
        self.random = random.Random(1)
        self.slept = []
        self.spin = Spin(self.clock, lambda: self.ran)

    def clock(self):
        """Each look at the clock takes a tenth of a microsecond of running."""
        self.now += 1e-7
        self.ran += 1e-7
        return self.now

    def forward(self):
        """One forward, waited for; returns its seconds."""
        started = self.now
        self.now += self.issue
        self.ran += self.issue
        done = started + self.seconds * (1 + self.jitter * self.random.random())

        def finish():
            self.slept.append(self.now < done)
            if self.now < done:
                self.now = done + self.wake
            if self.random.random() < self.disturbed:
                self.now += 30e-6
            self.now += self.call
            self.ran += self.call

        self.spin.wait(started, finish)
        return self.now - started


def test_finds_how_long_a_forward_takes():
    for seconds in (20e-6, 100e-6, 2e-3):
        machine = Machine(seconds)
        for _ in range(60):
            machine.forward()
        times = sorted(machine.forward() for _ in range(400))
        assert times[200] < seconds * 1.03 + 5e-6, "the median forward waits too long or sleeps"
        share = sum(machine.slept[-400:]) / 400
        assert 0.02 < share < 3 / (UP + 1), f"{share:.0%} of the waits were asleep"


def test_follows_a_device_that_becomes_slower_and_faster():
    machine = Machine(100e-6)
    for seconds in (100e-6, 130e-6, 80e-6):
        machine.seconds = seconds
        for _ in range(300):
            machine.forward()
        times = sorted(machine.forward() for _ in range(100))
        assert times[50] < seconds * 1.05 + 5e-6


def test_a_wait_that_is_long_but_not_asleep_does_not_raise_the_guess():
    machine = Machine(2e-3, call=4 * ASLEEP_S)  # the call itself runs long: it frees memory, say
    for _ in range(600):
        machine.forward()
    assert machine.spin.seconds < 2e-3 * 1.03


def test_a_device_quicker_than_issuing_leaves_a_guess_that_can_recover():
    machine = Machine(20e-6, issue=70e-6)
    for _ in range(100):
        machine.forward()
    assert 0 <= machine.spin.seconds <= 70e-6 and not any(machine.slept[3:])
    machine.seconds = 85e-6
    for _ in range(300):
        machine.forward()
    assert 0.95 * 85e-6 < machine.spin.seconds < 1.05 * 85e-6


def test_a_thread_clock_that_stands_still_does_not_let_the_guess_run_away():
    machine = Machine(100e-6)
    machine.spin.running = lambda: 0.0
    for _ in range(300):
        machine.forward()
    assert machine.spin.seconds < 3 * 100e-6


def test_the_first_forwards_do_not_count():
    machine = Machine(100e-6)
    machine.spin.learn(5.0, True)
    machine.spin.learn(1.0, True)
    assert machine.spin.seconds == 0.0
    machine.spin.learn(1e-4, True)
    assert machine.spin.seconds == 5e-5


def test_waits_that_sleep_whatever_the_guess_do_not_drive_it_up():
    machine = Machine(100e-6, disturbed=0.15)
    for _ in range(2000):
        machine.forward()
    assert machine.spin.seconds < 1.05 * 100e-6


def test_the_guess_stays_near_the_shortest_forward_where_every_wait_sleeps():
    machine = Machine(100e-6, disturbed=1.0)
    for _ in range(2000):
        machine.forward()
    assert machine.spin.seconds < 240e-6  # 1.3 times what a forward takes that slept twice
