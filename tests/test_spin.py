"""The awake wait: it must find the time a forward takes, follow it, and not run away."""

import random

from harness.spin import ASLEEP_S, UP, Spin


class Machine:
    """A clock, and a device whose forwards take `seconds`, with jitter, and whose sleepers wake late."""

    def __init__(self, seconds, wake=40e-6, jitter=0.01, call=3e-6, busy_call=False):
        self.now = self.ran = 0.0
        self.seconds, self.wake, self.jitter, self.call, self.busy_call = (
            seconds,
            wake,
            jitter,
            call,
            busy_call,
        )
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
        done = started + self.seconds * (1 + self.jitter * self.random.random())

        def finish():
            self.slept.append(self.now < done)
            if self.now < done:
                self.now = done + self.wake
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
    machine = Machine(2e-3, busy_call=True)  # the call itself runs for 20 µs: freeing memory, say
    for _ in range(300):
        machine.forward()
    assert machine.spin.seconds < 2e-3 * 1.03 and 20e-6 > ASLEEP_S


def test_the_first_forwards_do_not_count():
    machine = Machine(100e-6)
    machine.spin.learn(5.0, True)
    machine.spin.learn(1.0, True)
    assert machine.spin.seconds == 0.0
    machine.spin.learn(1e-4, True)
    assert machine.spin.seconds == 5e-5
