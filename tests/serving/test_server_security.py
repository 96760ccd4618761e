"""Clients without a token are refused, and a server with a certificate speaks TLS alone; with front ends, too.

The certificate in tests/serving/tls is for 127.0.0.1, signed by itself, and serves these tests alone.
"""

import contextlib
import pathlib
import re
import socket
import ssl
import time
import warnings

import httpx
import pytest
import server_cases as cases

from jaxsok import __main__ as command_line
from jaxsok.serving.http.security import Security

FOLDER = pathlib.Path(__file__).parent / "tls"
CERT, KEY = str(FOLDER / "cert.pem"), str(FOLDER / "key.pem")
OLD, NEW = "an-old-token-of-32-letters------", "a-new-token-of-32-letters-------"
LOOKUP, BODY = "/v1/models/ranker/lookup", {"keys": {"user": [4]}}


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "front ends"])
def found(request, tmp_path_factory):
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.txt"
    tokens.write_text(f"{OLD}\n\n  {NEW}\n")
    of_clients = Security.of({"token_file": tokens, "tls_cert": CERT, "tls_key": KEY})
    with cases.serving(cases.Session(), num_processes=request.param, of_clients=of_clients) as server:
        yield server


@pytest.fixture
def client(found):
    with httpx.Client(base_url=found.address, verify=ssl.create_default_context(cafile=CERT), timeout=20) as client:
        yield client


def bearing(token):
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize("token", [OLD, NEW])
def test_each_token_of_the_file_lets_a_client_in(client, token):
    assert client.base_url.scheme == "https"
    answer = client.post(LOOKUP, json=BODY, headers=bearing(token))
    assert answer.status_code == 200
    assert answer.json()["rows"] == {"user": [cases.row_of("user", 4, 1)]}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearing(OLD[:-1]),
        bearing(OLD + "x"),
        {"Authorization": "Bearer"},
        {"Authorization": OLD},
        {"Authorization": f"Basic {OLD}"},
    ],
    ids=["none", "short", "long", "no token", "no scheme", "another scheme"],
)
@pytest.mark.parametrize("path", [LOOKUP, "/v1/models", "/metrics", "/nowhere"])
def test_other_clients_are_refused_whatever_they_ask_for(client, path, headers):
    """Nothing says whether a model or a path exists; a large body is not taken, either."""
    for answer in (client.get(path, headers=headers), client.post(path, headers=headers, content=b"x" * 300_000)):
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "unauthorized"
        assert OLD[:-1] not in answer.text


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_load_balancers_need_no_token(client, path):
    assert client.get(path).status_code == 200


def test_there_is_no_answer_without_tls(found):
    port = int(found.address.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" not in connection.recv(4096)


@contextlib.contextmanager
def tls_connection(found, context):
    port = int(found.address.rsplit(":", 1)[1])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        yield connection


def test_old_versions_of_tls_are_refused(found):
    context = ssl.create_default_context(cafile=CERT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(OSError, match=r"SSL|reset"), tls_connection(found, context):
        pass


def test_a_damaged_request_is_refused_over_tls(found):
    """The refusal comes from below the application."""
    with tls_connection(found, ssl.create_default_context(cafile=CERT)) as connection:
        connection.sendall(b"this is no HTTP\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 400")


def test_idle_clients_do_not_hold_up_a_stop():
    """A client of a pool does not read while it is idle, so it does not answer the end of TLS."""
    of_clients = Security.of({"tls_cert": CERT, "tls_key": KEY})
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(cases.serving(cases.Session(), of_clients=of_clients, keep_alive_s=0.5))
        with tls_connection(found, ssl.create_default_context(cafile=CERT)) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 OK" in connection.recv(4096)
            begin = time.monotonic()
            stack.close()
            assert time.monotonic() - begin < 10


def test_tokens_are_not_printed():
    assert OLD not in repr(Security(tokens=(OLD.encode(),)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "with 0 tokens, wanted at least one"),
        ("short\n", "wanted at least one, each of 16 or more"),
        (f"{OLD}\nfifteen-letters\n", "with 2 tokens"),
        ("with spaces in between it\n", "without spaces"),
        ("ümläüts-and-sixteen-letters\n", "ASCII"),
        (f"{OLD}\n" * 2000, "more than 65536 bytes"),
        (None, "give a file that can be read"),
    ],
)
def test_bad_token_files_are_refused(tmp_path, text, message):
    path = tmp_path / "tokens.txt"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises((OSError, ValueError), match=f"serve: --token-file: got .*{message}"):
        Security.of({"token_file": str(path)})


def test_bad_certificates_are_refused_before_a_model_is_loaded(tmp_path, capsys):
    (tmp_path / "nothing.pem").write_text("nothing")
    for options, message in (
        (["--tls-cert", str(tmp_path / "missing.pem")], "serve: --tls-cert: got .*missing.pem"),
        (["--tls-cert", str(tmp_path / "nothing.pem")], "give a certificate and its key in PEM"),
        (["--tls-cert", CERT], "serve: --tls-cert: got .*cert.pem"),  # the key is in another file
        (["--tls-key", KEY], "serve: --tls-key: got .* without --tls-cert; give both"),
    ):
        assert command_line.main(["serve", str(tmp_path / "no-model.json"), *options]) == 2
        error = capsys.readouterr().err
        assert re.search(message, error), error


def test_files_may_go_once_they_are_read(tmp_path):
    """Front ends that start again have what the server began with."""
    for name, path in (("cert.pem", CERT), ("key.pem", KEY)):
        (tmp_path / name).write_bytes(pathlib.Path(path).read_bytes())
    found = Security.of({"tls_cert": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem")})
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).unlink()
    assert found.context() is not None
    assert "PRIVATE KEY" not in repr(found)


def test_refused_clients_are_counted(found, client):
    def num_refused():
        text = client.get("/metrics", headers=bearing(NEW)).text
        return sum(
            float(line.split()[-1]) for line in text.splitlines() if re.match(r".*requests_total.*\"401\"", line)
        )

    before = num_refused()
    assert client.get("/v1/models").status_code == 401
    assert num_refused() == before + 1
