"""Waiting for a GPU with the thread awake, where the framework can only wait asleep.

`mx.eval` sleeps until the GPU says that it is done, and waking up costs tens of microseconds, as much as a
small network takes. MLX has no way to ask whether an array is ready, so the only way to be awake then is to
know when: `Spin` learns how long a forward takes and spins about as long as three in four need. More is
spun in vain by all the others; and a wait may sleep for other reasons, which must not drive the guess up.
"""

import time
from collections.abc import Callable

ASLEEP_S = 10e-6  # a wait in which the thread did not run for longer than this was asleep
UNCOUNTED = 2  # first forwards, which compile and allocate
FIRST_STEP = 0.25  # of the first forward that counts, by which the guess is first moved
LAST_STEP = 0.004  # of a forward; the guess comes down by this for each that was ready
MOST = 1.3  # times the shortest forward so far: where every wait seems asleep, the guess must not run away
UP = 3  # last steps up for each that was not: in balance one forward in four still sleeps


class Spin:
    """Learns, forward by forward, how long to spin before a wait that then need not sleep.

    The guess moves down by a step where the result was ready and up where it was not; at first steps are
    large and halve at each turn upwards. A device that becomes slower by more than MOST is waited for asleep
    from then on. Costs: a core, which spins, and what the guess is too long for a forward quicker than three
    in four.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        running: Callable[[], float] = time.thread_time,
    ) -> None:
        self.clock, self.running = clock, running  # seconds; of this thread, only those in which it runs
        self.seconds = 0.0  # the guess
        self.step = 0.0
        self.seen = 0
        self.shortest = float("inf")  # forward so far, in seconds

    def wait(self, started: float, finish: Callable[[], None]) -> None:
        """Return when `finish` does, which waits for the forward that began at `started` by the clock."""
        clock, until = self.clock, started + self.seconds
        while clock() < until:
            pass
        before, ran = clock(), self.running()
        finish()
        ran, after = self.running() - ran, clock()
        self.learn(after - started, (after - before) - ran > ASLEEP_S)

    def learn(self, took: float, slept: bool) -> None:
        """Adapt the guess to a forward that took so many seconds, and to whether its wait was asleep."""
        self.seen += 1
        if self.seen <= UNCOUNTED:
            return
        if self.seen == UNCOUNTED + 1:
            self.seconds, self.step = 0.5 * took, FIRST_STEP * took
            return
        self.shortest = min(self.shortest, took)
        least = LAST_STEP * took
        if not slept:
            self.seconds = max(0.0, self.seconds - max(self.step, least))
        elif self.step > least:
            self.seconds += self.step
            self.step /= 2
        else:
            self.seconds += UP * least
        self.seconds = min(self.seconds, MOST * self.shortest)
