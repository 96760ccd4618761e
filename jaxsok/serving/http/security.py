"""The clients that a server answers: those that give one of its tokens, over TLS if it has a certificate."""

import dataclasses
import hmac
import os
import pathlib
import ssl
from collections.abc import Mapping
from typing import Any

from jaxsok.serving.http.responses import CLOSE, Refusal

LEAST_LETTERS = 16  # of a token
_MAX_BYTES = 1 << 16  # of a file of tokens
OPEN_PATHS = ("/healthz", "/readyz")  # for load balancers: they say nothing of models


@dataclasses.dataclass(frozen=True)
class Security:
    """The demands of a server on its clients; all of its processes make the same."""

    tokens: tuple[bytes, ...] = dataclasses.field(default=(), repr=False)
    """A request must have one of them; none: it needs no token."""
    pem: bytes = dataclasses.field(default=b"", repr=False)
    """The server's key and certificate in PEM, and those up to its root; none: no TLS."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Security":
        """Reads the files that the command line names; an OSError or ValueError says which of them is no good."""
        cert, key = given.get("tls_cert"), given.get("tls_key")
        if key is not None and cert is None:
            raise ValueError(f"serve: --tls-key: got {key!r} without --tls-cert; give both.")
        tokens = _read_tokens(given.get("token_file"))
        if cert is None:
            return cls(tokens)
        files = [os.fspath(path) for path in (key, cert) if path is not None]
        try:
            found = cls(tokens, b"\n".join([pathlib.Path(path).read_bytes() for path in files]))
            found.context()
        except OSError as error:  # also errors of OpenSSL
            names = " and ".join(reversed(files))
            where = "" if key is not None else " there, or the key with --tls-key"
            raise OSError(
                f"serve: --tls-cert: got {names}: {error}; give a certificate and its key in PEM{where}."
            ) from None
        return found

    @property
    def scheme(self) -> str:
        return "https" if self.pem else "http"

    def context(self) -> ssl.SSLContext | None:
        """Makes the context of TLS 1.2 and later; None without a certificate."""
        if not self.pem:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # OpenSSL reads files alone, and those of the command line may be others by now.
        with os.fdopen(os.memfd_create("jaxsok-tls"), "wb") as file:
            file.write(self.pem)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}", password=_refuse_password)
        return context

    def refusal_of(self, scope: Mapping[str, Any]) -> Refusal | None:
        """Returns the refusal of a request without one of the tokens; None: it may pass."""
        if not self.tokens or scope["path"] in OPEN_PATHS:
            return None
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        # All are compared, each in a time that does not depend on how much of it is right.
        is_right = [hmac.compare_digest(token.strip(), known) for known in self.tokens]
        if scheme.lower() == b"bearer" and any(is_right):
            return None
        message = "authorization: wanted one of the server's tokens, as `Authorization: Bearer TOKEN`."
        return Refusal(401, "unauthorized", message, {"WWW-Authenticate": "Bearer", **CLOSE})


OPEN = Security()
"""Asks nothing of clients."""


def _read_tokens(path: str | os.PathLike[str] | None) -> tuple[bytes, ...]:
    """Reads the tokens of a file, one on each line."""
    if path is None:
        return ()
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise OSError(f"serve: --token-file: got {os.fspath(path)}: {error}; give a file that can be read.") from None
    if len(text) > _MAX_BYTES:  # a token that is cut off would be a shorter one
        what = f"{os.fspath(path)} with more than {_MAX_BYTES} bytes"
        raise ValueError(f"serve: --token-file: got {what}; give fewer tokens.")
    tokens = tuple(token for line in text.splitlines() if (token := line.strip()))
    if not tokens or any(len(token) < LEAST_LETTERS or not token.isascii() or b" " in token for token in tokens):
        raise ValueError(
            f"serve: --token-file: got {os.fspath(path)} with {len(tokens)} tokens, wanted at least one, each of "
            f"{LEAST_LETTERS} or more ASCII characters without spaces, on a line of its own."
        )
    return tokens


def _refuse_password() -> str:
    raise OSError("the key has a password, which a server cannot ask for")
