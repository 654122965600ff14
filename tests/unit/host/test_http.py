"""host.http: answers of real servers, among them broken ones."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvp_kit import clean_environment
from kvpersist.core.recovery import Answer
from kvpersist.host.http import HttpError, answers, ask, get_json, get_text

USAGE = {"prompt_tokens": 900, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 768}}


class Scripted(ThreadingHTTPServer):
    """Answers every request with its ``script``; keeps what it was asked."""

    script: tuple[int, list[bytes | float]] = (200, [])

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, dict[str, str], bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gives up early is what some tests want."""


class _Handler(BaseHTTPRequestHandler):
    server: Scripted

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.path, dict(self.headers.items()), body))
        status, pieces = self.server.script
        self.send_response(status)
        self.end_headers()
        for piece in pieces:
            if isinstance(piece, float):
                time.sleep(piece)
            else:
                self.wfile.write(piece)
                self.wfile.flush()

    do_GET = do_POST = _answer  # noqa: N815  # http.server's names

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  # http.server's name
        pass


@pytest.fixture
def server() -> Iterator[Scripted]:
    with Scripted() as scripted:
        thread = threading.Thread(target=scripted.serve_forever, args=(0.01,))
        thread.start()
        yield scripted
        scripted.shutdown()
        thread.join()


@pytest.fixture
def raw_server() -> Iterator[Callable[[bytes], str]]:
    """A server that answers one request with exactly these bytes and closes the connection."""
    sockets: list[socket.socket] = []

    def serve(reply: bytes) -> str:
        listening = socket.create_server(("127.0.0.1", 0))
        sockets.append(listening)

        def run() -> None:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(reply)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass

        threading.Thread(target=run, daemon=True).start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield serve
    for each in sockets:
        each.close()


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def token(text: str | None) -> bytes:
    return event({"choices": [{"delta": {"content": text}}]})


def end(usage: Any = USAGE) -> list[bytes | float]:
    return [event({"choices": [], "usage": usage}), b"data: [DONE]\n\n"]


def ask_it(url: str, timeout_s: float = 5.0) -> Answer:
    return ask(url, "tiny", "What is the capital?", 24, timeout_s)


def test_text_usage_and_cached_tokens_of_a_stream(server: Scripted) -> None:
    server.script = (200, [b": comment\n\n", token(""), token("Pa"), token("ris"), *end()])
    answer = ask_it(server.url)
    assert (answer.text, answer.prompt_tokens, answer.cached_tokens) == ("Paris", 900, 768)


def test_time_to_first_token_ends_with_the_first_text_not_with_the_first_byte(server: Scripted) -> None:
    server.script = (
        200,
        [event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}), 0.2, token("x"), 0.3, *end()],
    )
    answer = ask_it(server.url)
    assert 0.2 <= answer.ttft_s < 0.45


def test_the_request_is_greedy_seeded_streamed_and_asks_for_usage(server: Scripted) -> None:
    server.script = (200, [token("x"), *end()])
    ask_it(server.url)
    (path, headers, body) = server.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body) == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What is the capital?"}],
        "max_tokens": 24,
        "temperature": 0,
        "seed": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize("details", [None, {}, {"cached_tokens": None}])
def test_cached_tokens_that_are_not_reported_are_none_not_zero(server: Scripted, details: Any) -> None:
    server.script = (200, [token("x"), *end({"prompt_tokens": 5, "prompt_tokens_details": details})])
    assert ask_it(server.url).cached_tokens is None


def test_zero_cached_tokens_are_zero(server: Scripted) -> None:
    server.script = (200, [token("x"), *end({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0}})])
    assert ask_it(server.url).cached_tokens == 0


def test_an_error_event_in_the_stream_is_an_error(server: Scripted) -> None:
    server.script = (200, [token("x"), event({"error": {"message": "KV load failed"}}), *end()])
    with pytest.raises(HttpError, match=r"asking the engine at 127\.0\.0\.1:\d+: it answered .*KV load failed"):
        ask_it(server.url)


@pytest.mark.parametrize(
    "pieces",
    [[], [token("x")], [token("x"), b"data: [DONE]\n\n"], end(), [token(None), *end()]],
    ids=["nothing", "cut", "no-usage", "no-text", "null-text"],
)
def test_a_stream_that_ends_without_text_or_usage_is_an_error(server: Scripted, pieces: list[bytes | float]) -> None:
    server.script = (200, pieces)
    with pytest.raises(HttpError, match="the stream ended without an answer"):
        ask_it(server.url)


def test_an_engine_that_falls_silent_is_given_up(server: Scripted) -> None:
    server.script = (200, [token("x"), 1.0, *end()])
    with pytest.raises(HttpError, match="timed out"):
        ask_it(server.url, timeout_s=0.2)


@pytest.mark.parametrize("status", [400, 404, 500, 503])
def test_an_http_error_is_named_with_what_the_server_said(server: Scripted, status: int) -> None:
    server.script = (status, [b'{"message": "engine is dead"}'])
    with pytest.raises(HttpError, match=f"it answered HTTP {status} .*engine is dead"):
        ask_it(server.url)
    with pytest.raises(HttpError, match=f"it answered HTTP {status} .*engine is dead"):
        get_text(server.url)
    assert not answers(server.url)


def test_an_error_page_of_many_lines_becomes_one_line(server: Scripted) -> None:
    server.script = (500, [b"<html>\n\n<body>Internal\r\nServer Error" + b"!" * 1000])
    with pytest.raises(HttpError) as caught:
        get_text(server.url)
    assert "<html> <body>Internal Server Error!!!" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_closed_port_is_an_error_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    for call in (get_text, ask_it):
        with pytest.raises(HttpError, match=r"connection refused\. "):
            call(url)
    assert not answers(url)


CUT_CHUNK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"%x\r\n" % len(token("x")) + token("x")


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f",
        b"",
        b"HTTP/1.1 two hundred\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}",
        CUT_CHUNK,
        CUT_CHUNK + b"\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: 1\r\n" * 200 + b"\r\n",
    ],
    ids=["ssh", "zmq", "closed", "bad-status", "short", "cut-in-chunk", "cut-after-chunk", "bad-chunk", "many-headers"],
)
@pytest.mark.parametrize("call", [get_text, ask_it])
def test_a_server_that_breaks_off_or_speaks_no_http_is_an_error_in_words(
    raw_server: Callable[[bytes], str], reply: bytes, call: Callable[[str], Any]
) -> None:
    with pytest.raises(HttpError) as caught:
        call(raw_server(reply))
    assert "\n" not in str(caught.value)


def test_a_stranger_that_speaks_no_http_does_not_answer(raw_server: Callable[[bytes], str]) -> None:
    assert not answers(raw_server(b"SSH-2.0-OpenSSH_9.2\r\n"))


def test_json_is_parsed_and_other_text_is_an_error(server: Scripted) -> None:
    server.script = (200, [b'{"a": [1]}'])
    assert get_json(server.url) == {"a": [1]}
    server.script = (200, [b"<html>"])
    with pytest.raises(HttpError, match="the answer is not JSON"):
        get_json(server.url)


def test_a_proxy_of_the_environment_never_sees_a_request(server: Scripted) -> None:
    proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    server.script = (200, [token("x"), *end()])
    program = "import sys; from kvpersist.host.http import ask, get_text as g; g(sys.argv[1]); ask(*sys.argv[1:], 1, 5)"
    subprocess.run(
        [sys.executable, "-c", program, server.url, "tiny", "x"], check=True, env=clean_environment(**proxies)
    )
    assert [path or "/" for path, _, _ in server.requests] == ["/", "/v1/chat/completions"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "delta", "content", "usage", "prompt_tokens", "prompt_tokens_details", "cached_tokens", "x"]
            ),
            children,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(events=st.lists(JSON, max_size=3))
def test_any_events_are_an_answer_or_an_error_in_words(events: list[Any]) -> None:
    reply = (
        b"HTTP/1.1 200 OK\r\n\r\n"
        + b"".join(map(event, events))
        + token("x")
        + b"".join(piece for piece in end() if isinstance(piece, bytes))
    )
    listening = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(reply)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        outcome: Answer | HttpError = ask_it(f"http://127.0.0.1:{listening.getsockname()[1]}")
    except HttpError as error:
        outcome = error
    finally:
        thread.join()
        listening.close()
    assert isinstance(outcome, Answer) or "See the engine's log." in str(outcome)
