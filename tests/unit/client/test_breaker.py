from datastore_service.client.breaker import BreakerState, CircuitBreaker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> CircuitBreaker:
    breaker = CircuitBreaker(failures=3, first_delay=1.0, longest_delay=4.0, clock=clock)
    for _ in range(3):
        breaker.failed()
    return breaker


def test_opens_after_failures_in_a_row():
    breaker = CircuitBreaker(failures=3)
    for outcome in (breaker.failed, breaker.failed, breaker.succeeded, breaker.failed, breaker.failed):
        outcome()
    assert breaker.allows_calls
    breaker.failed()
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows_calls


def test_probe_is_due_after_the_delay():
    clock = Clock()
    breaker = opened(clock)
    assert not breaker.probe_due
    clock.now = 1.0
    assert breaker.probe_due


def test_probe_half_opens_and_one_success_closes():
    breaker = opened(Clock())
    breaker.probe_answered()
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.allows_calls
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED


def test_one_failure_while_half_open_opens_and_doubles_the_delay():
    clock = Clock()
    breaker = opened(clock)
    breaker.probe_answered()
    breaker.failed()
    assert breaker.state is BreakerState.OPEN
    clock.now = 1.9
    assert not breaker.probe_due
    clock.now = 2.0
    assert breaker.probe_due


def relapse(breaker: CircuitBreaker) -> None:
    breaker.probe_answered()
    breaker.failed()


def test_delay_is_bounded_and_starts_anew_after_a_recovery():
    clock = Clock()
    breaker = opened(clock)
    for _ in range(10):
        relapse(breaker)
    clock.now = 3.9
    assert not breaker.probe_due
    clock.now = 4.0
    assert breaker.probe_due
    breaker.probe_answered()
    breaker.succeeded()
    for _ in range(3):
        breaker.failed()
    clock.now = 5.0
    assert breaker.probe_due


def test_by_default_a_slow_service_is_tried_every_5_seconds():
    clock = Clock()
    breaker = CircuitBreaker(clock=clock)
    for _ in range(3):
        breaker.failed()
    for _ in range(20):
        relapse(breaker)
    clock.now = 4.9
    assert not breaker.probe_due
    clock.now = 5.0
    assert breaker.probe_due
