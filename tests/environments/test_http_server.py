"""Clients that behave: answered. Clients that do not: refused in words, or cut off in time, and nobody else waits."""

import asyncio
import hashlib
import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from shardwise.environments import HttpServer
from shardwise.environments.chat_format import ApiError


async def echo(request):
    match request.path:
        case "/events":
            return [{"number": 1}, {"number": 2}]
        case "/broken":
            raise KeyError("x")
        case "/refused":
            raise ApiError(409, "not now", code="busy", param="a")
        case "/slow":
            await asyncio.sleep(0.3)
    return {"method": request.method, "path": request.path, "token": request.token, "body": request.body}


@pytest.fixture(scope="module")
def server():
    with closing(HttpServer(echo, is_known=lambda t: t in ("a", "b"), max_body_bytes=5000, timeout_seconds=0.5)) as s:
        yield s


def ask(server, path="/x", body=None, token="a", method="POST"):
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as connection:
        connection.request(method, path, body, {"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        return response.status, response.read().decode()


def send(server, data, pause=0.0):
    """What comes back for bytes sent one by one, with a pause before each, as far as they are taken."""
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=10)) as sock:
        try:
            for place in range(len(data)) if pause else ():
                sock.sendall(data[place : place + 1])
                time.sleep(pause)
            if not pause:
                sock.sendall(data)
            return b"".join(iter(lambda: sock.recv(4096), b"")).decode()
        except ConnectionError:
            return ""


def test_an_object_is_answered_with_an_object(server):
    status, body = ask(server, "/x?y=1", json.dumps({"é": [1]}).encode(), token="b")
    assert (status, json.loads(body)) == (200, {"method": "POST", "path": "/x", "token": "b", "body": {"é": [1]}})
    assert json.loads(ask(server, method="GET")[1])["body"] is None


def test_several_objects_are_events(server):
    assert ask(server, "/events") == (200, 'data: {"number": 1}\n\ndata: {"number": 2}\n\ndata: [DONE]\n\n')


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("/refused", 409, {"message": "not now", "type": "invalid_request_error", "param": "a", "code": "busy"}),
        ("/broken", 500, {"message": "KeyError: 'x'", "type": "server_error", "param": None, "code": "internal_error"}),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_told_in_the_form_of_openai(server, path, status, error):
    found, body = ask(server, path)
    assert (found, json.loads(body)) == (status, {"error": error})


def test_it_listens_on_the_loopback_interface_alone(server):
    assert server._server.sockets[0].getsockname() == ("127.0.0.1", server.port)
    assert len(server._server.sockets) == 1


@pytest.mark.parametrize("token", ["c", "", "a b"])
def test_without_a_known_token_nothing_is_answered(server, token):
    status, body = ask(server, token=token)
    assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.alone
def test_f47_no_byte_of_a_body_is_waited_for_before_its_token_is_known(server):
    began = time.monotonic()
    assert "401 Unauthorized" in send(server, b"POST /x HTTP/1.1\r\nContent-Length: 4000\r\n\r\n")
    assert time.monotonic() - began < 0.4


def test_f47_a_huge_body_is_refused_and_not_kept(server):
    status, body = ask(server, body=b"x" * 2_000_000)
    assert status == 413
    assert "the body has 2000000 bytes, at most 5000 are read" in body


def test_f47_a_huge_body_without_a_known_token_is_told_so(server):
    status, body = ask(server, body=b"x" * 12_000_000, token="c")
    assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.alone
def test_f47_a_refused_client_that_goes_on_sending_is_cut_off(server):
    began = time.monotonic()
    assert send(server, b"POST /x HTTP/1.1\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000, pause=0.02) == ""
    assert 0.4 < time.monotonic() - began < 5


HEAD = b"POST /x HTTP/1.1\r\nAuthorization: Bearer a\r\n"


@pytest.mark.alone
@pytest.mark.parametrize("expect", [b"100-continue", b"100-Continue"])
def test_a_client_that_asks_before_it_sends_its_body_is_told_to_go_on(server, expect):
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=0.4)) as sock:
        sock.sendall(HEAD + b"Expect: " + expect + b"\r\nContent-Length: 3\r\n\r\n")
        assert sock.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"[1]")
        assert b'"body": [1]' in b"".join(iter(lambda: sock.recv(4096), b""))


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD + b"Content-Length: 6000\r\n", "413 "),
        (HEAD.replace(b"r a", b"r c") + b"Content-Length: 3\r\n", "401 "),
        (HEAD + b"Transfer-Encoding: chunked\r\n", "411 "),
    ],
)
def test_a_client_that_asks_before_it_sends_what_is_refused_is_told_so_at_once(server, data, status):
    assert send(server, data + b"Expect: 100-continue\r\n\r\n").startswith(f"HTTP/1.1 {status}")


def test_a_client_too_old_to_know_interim_answers_gets_none(server):
    head = HEAD.replace(b"1.1", b"1.0") + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n"
    assert send(server, head + b"[1]").startswith("HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"hello\r\n\r\n", "400 Bad Request"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", "400 Bad Request"),
        (HEAD + b"Content-Length: -1\r\n\r\n", "Content-Length is '-1', expected a number"),
        (HEAD + b"Content-Length: 99999999999999999999\r\n\r\n", "expected a number"),
        (HEAD + b"Content-Length: 3\r\n\r\n{a}", "the body is not JSON"),
        (HEAD + b"Content-Length: 5000\r\n\r\n" + b"[" * 5000, "the body is not JSON"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "411 Length Required"),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 200_000, ""),
    ],
)
def test_what_is_no_request_is_refused(server, data, told):
    assert told in send(server, data)
    assert ask(server)[0] == 200


@pytest.mark.alone
@pytest.mark.parametrize("data", [HEAD, HEAD + b"Content-Length: 50\r\n\r\n" + b" " * 50])
def test_f47_bytes_that_drip_do_not_move_the_deadline(server, data):
    began = time.monotonic()
    assert send(server, data, pause=0.05) in ("", send(server, HEAD + b"Content-Length: 1\r\n\r\n"))
    assert time.monotonic() - began < 5
    assert ask(server)[0] == 200


@pytest.mark.alone
def test_f47_who_says_nothing_is_told_so_and_cut_off(server):
    began = time.monotonic()
    assert "408 Request Timeout" in send(server, HEAD)
    assert 0.4 < time.monotonic() - began < 5


def test_f47_who_takes_no_answer_is_cut_off():
    async def much(request):
        return {"text": "x" * 50_000_000}

    with closing(HttpServer(much, is_known=lambda t: True, timeout_seconds=0.3)) as server:
        sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        sock.sendall(HEAD + b"\r\n")
        time.sleep(1)
        with closing(sock):
            assert sum(map(len, iter(lambda: sock.recv(1 << 20), b""))) < 50_000_000


def test_everybody_may_come_at_the_same_moment():
    """More than asyncio lets wait by default, beside a thread that is busy as generation is; whoever found no place
    would be cut off while asking."""
    everybody, is_over, kernel = threading.Barrier(400), threading.Event(), bytes(200_000)

    def is_busy():
        while not is_over.is_set():
            sum(range(2_000))
            hashlib.sha256(kernel)  # as a kernel does, it lets other threads run

    def comes(number):
        found = []
        for _ in range(3):
            everybody.wait(20)
            found.append(ask(server, "/slow", b"1" * 3000)[0])
        return found

    with closing(HttpServer(echo, is_known=lambda t: True)) as server, ThreadPoolExecutor(401) as threads:
        threads.submit(is_busy)
        try:
            assert list(threads.map(comes, range(400))) == [[200] * 3] * 400
        finally:
            is_over.set()


def test_a_client_that_goes_away_does_no_harm(server):
    for data in (b"", b"POST", HEAD + b"Content-Length: 9\r\n\r\nx", HEAD.replace(b"/x", b"/slow") + b"\r\n"):
        with closing(socket.create_connection(("127.0.0.1", server.port))) as sock:
            sock.sendall(data)
    assert ask(server)[0] == 200


def test_after_close_nobody_is_answered():
    server = HttpServer(echo, is_known=lambda t: True)
    assert ask(server)[0] == 200
    server.close()
    with pytest.raises(ConnectionError):
        ask(server)
