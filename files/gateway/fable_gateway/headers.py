"""Which headers cross the gateway, in either direction."""

from __future__ import annotations

from collections.abc import Mapping

from multidict import CIMultiDict, CIMultiDictProxy

# RFC 9110, 7.6.1
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# The body is read, decompressed and sent anew, so its framing is not the client's.
REFRAMED = frozenset({"host", "content-length", "content-encoding", "accept-encoding", "expect"})
SECRETS = frozenset({"authorization", "x-api-key", "api-key", "cookie"})
# Whatever a client says of where it comes from; nobody here believes it.
ORIGINS = frozenset(
    {"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"}
)


def _named_by_connection(headers: Mapping[str, str]) -> frozenset[str]:
    listed = headers.get("Connection", "")
    return frozenset(name.strip().lower() for name in listed.split(",") if name.strip())


def to_engine(headers: CIMultiDictProxy[str], request_id: str) -> CIMultiDict[str]:
    """The request's headers as the engine may see them: no keys, nothing of this connection."""
    dropped = HOP_BY_HOP | REFRAMED | SECRETS | ORIGINS | _named_by_connection(headers)
    kept = CIMultiDict((n, v) for n, v in headers.items() if n.lower() not in dropped)
    kept["Accept-Encoding"] = "identity"
    kept["X-Request-Id"] = request_id
    return kept


def to_client(headers: CIMultiDictProxy[str], request_id: str) -> CIMultiDict[str]:
    """The answer's headers as the client sees them; no Content-Length beside chunks."""
    dropped = HOP_BY_HOP | _named_by_connection(headers)
    if "Transfer-Encoding" in headers:
        dropped |= {"content-length"}
    kept = CIMultiDict((n, v) for n, v in headers.items() if n.lower() not in dropped)
    kept.setdefault("X-Request-Id", request_id)
    return kept
