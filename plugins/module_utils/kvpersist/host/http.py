"""HTTP on loopback: small answers, and one streamed chat request whose first token is timed."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlparse

from ..core.errors import KvpError
from ..core.recovery import Answer
from .files import reason

# A proxy of the environment must never see requests to this host.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# HTTPException: a server that speaks no HTTP, or breaks off in the middle of it.
_FAILURES = (OSError, ValueError, http.client.HTTPException)


class HttpError(KvpError):
    """A request got no usable answer."""


def get_text(url: str, timeout_s: float = 5.0) -> str:
    """Body of a GET request.

    Raises:
        HttpError: when the server does not answer with success.
    """
    try:
        with _OPENER.open(url, timeout=timeout_s) as response:
            return str(response.read().decode("utf-8", "replace"))
    except _FAILURES as error:
        raise HttpError(f"asking {url}", _cause(error), "Check that the service runs.") from None


def get_json(url: str, timeout_s: float = 5.0) -> Any:
    """JSON answer of a GET request.

    Raises:
        HttpError: when the server does not answer, or not in JSON.
    """
    text = get_text(url, timeout_s)
    try:
        return json.loads(text)
    except ValueError:
        raise HttpError(f"asking {url}", "the answer is not JSON", "Check what serves this port.") from None


def answers(url: str, timeout_s: float = 2.0) -> bool:
    """Whether a GET request succeeds."""
    try:
        get_text(url, timeout_s)
    except HttpError:
        return False
    return True


def ask(base_url: str, model: str, prompt: str, max_tokens: int, timeout_s: float) -> Answer:
    """One greedy chat request, streamed.

    Args:
        base_url: the engine's base URL.
        timeout_s: seconds without a byte from the engine after which it is given up.

    Raises:
        HttpError: when the engine refuses the request or the stream ends early.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "seed": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{base_url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    doing = f"asking the engine at {urlparse(base_url).netloc}"
    start = time.monotonic()
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            answer = _read_stream(response, start, doing)
    except _FAILURES as error:
        raise HttpError(doing, _cause(error), "See the engine's log.") from None
    except (AttributeError, KeyError, TypeError):
        raise HttpError(doing, "it sent an event of unknown form", "See the engine's log.") from None
    if answer is None:
        raise HttpError(doing, "the stream ended without an answer", "See the engine's log.")
    return answer


def _read_stream(lines: Iterable[bytes], start: float, doing: str) -> Answer | None:
    pieces: list[str] = []
    first: float | None = None
    usage: dict[str, Any] | None = None
    for raw in lines:
        line = raw.decode("utf-8").strip()
        if not line.startswith("data:") or line == "data: [DONE]":
            continue
        event = json.loads(line[len("data:") :])
        if "error" in event:
            raise HttpError(doing, f"it answered {event['error']}", "See the engine's log.")
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            content = choice.get("delta", {}).get("content")
            if content:
                first = first if first is not None else time.monotonic() - start
                pieces.append(content)
    if first is None or usage is None:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Answer("".join(pieces), first, int(usage["prompt_tokens"]), details.get("cached_tokens"))


def _cause(error: BaseException) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"it answered HTTP {error.code} ({_body(error)})"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
        return reason(error.reason)
    if isinstance(error, http.client.HTTPException):
        return f"the answer is no whole HTTP ({type(error).__name__})"
    return reason(error)


def _body(error: urllib.error.HTTPError) -> str:
    try:
        return " ".join(error.read(300).decode("utf-8", "replace").split())
    except _FAILURES:
        return "and broke off"
