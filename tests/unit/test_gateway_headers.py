"""Headers that must not cross together."""

from __future__ import annotations

import pytest
from fable_gateway.headers import to_client
from multidict import CIMultiDict, CIMultiDictProxy


@pytest.mark.parametrize(
    ("received", "sent"),
    [
        ({"content-length": "7"}, {"content-length": "7", "x-request-id": "id"}),
        ({"Content-Length": "7", "Transfer-Encoding": "chunked"}, {"x-request-id": "id"}),
        (
            {"Connection": "X-Hop, close", "X-HOP": "1", "X-Request-Id": "own"},
            {"x-request-id": "own"},
        ),
    ],
    ids=["length alone", "length beside chunks", "named by Connection"],
)
def test_framing_and_hops_stay_behind(received: dict[str, str], sent: dict[str, str]) -> None:
    kept = to_client(CIMultiDictProxy(CIMultiDict(received)), "id")
    assert {name.lower(): value for name, value in kept.items()} == sent
