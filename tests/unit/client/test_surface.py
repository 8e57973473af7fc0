"""The public surface: live forms match, and the whole tree of errors has one root."""

import inspect

import pytest

import contrail_client
from contrail_client import (
    AsyncOrderedReader,
    AsyncPublisher,
    AsyncPulledMessage,
    AsyncPushedMessage,
    AsyncSubscription,
    Contrail,
    OrderedReader,
    Publisher,
    PulledMessage,
    PushedMessage,
    Subscription,
    errors,
)
from tests.support.each import each


def methods(of: type) -> dict[str, list[str]]:
    return {
        name: list(inspect.signature(method).parameters)
        for name, method in inspect.getmembers(of, inspect.isfunction)
        if not name.startswith("_")
    }


@each(
    ("sync", "asynchronous"),
    [
        (Publisher, AsyncPublisher),
        (Subscription, AsyncSubscription),
        (OrderedReader, AsyncOrderedReader),
        (PushedMessage, AsyncPushedMessage),
    ],
)
def test_live_methods_are_those_of_the_asynchronous_form(sync: type, asynchronous: type) -> None:
    # The asynchronous form has more: what the connection calls.
    assert methods(sync).items() <= methods(asynchronous).items()


@pytest.mark.parametrize(
    ("pulled", "pushed"), [(PulledMessage, PushedMessage), (AsyncPulledMessage, AsyncPushedMessage)]
)
def test_pulled_message_is_acknowledged_as_a_pushed_one(pulled: type, pushed: type) -> None:
    ways = ("ack", "nak", "term", "in_progress", "ack_sync")
    assert {way: methods(pulled)[way] for way in ways}.items() <= methods(pushed).items()


def test_everything_exported_exists() -> None:
    assert all(hasattr(contrail_client, name) for name in contrail_client.__all__)


def test_every_error_is_a_contrail_error() -> None:
    found = [each for _, each in inspect.getmembers(errors, inspect.isclass)]
    exceptions = [each for each in found if issubclass(each, Exception)]
    assert all(issubclass(each, errors.ContrailError) for each in exceptions)


@each("url", ["", "localhost:7420", "ftp://x", "http://", "http://x:99999"])
def test_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|[Pp]ort"):
        Contrail(url)
