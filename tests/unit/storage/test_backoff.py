"""Pauses between tries grow up to a bound, and a reason is news once."""

from contrail_storage.upkeep.backoff import Backoff


def test_pauses_double_up_to_the_bound_until_something_succeeds() -> None:
    backoff = Backoff(1.0, 5.0)
    assert backoff.pause_s == 0.0
    pauses = []
    for _ in range(4):
        backoff.failed("no space")
        pauses.append(backoff.pause_s)
    assert pauses == [1.0, 2.0, 4.0, 5.0]
    backoff.succeeded()
    assert backoff.pause_s == 0.0
    backoff.failed("no space")
    assert backoff.pause_s == 1.0


def test_reason_is_news_when_it_is_another_one_or_something_succeeded_meanwhile() -> None:
    backoff = Backoff(1.0, 5.0)
    news = [backoff.failed(reason) for reason in ("full", "full", "gone", "gone", "full")]
    assert news == [True, False, True, False, True]
    backoff.succeeded()
    assert backoff.failed("full")
