"""Encryption of a channel: contexts made from PEM files, checked where they are set."""

from __future__ import annotations

import ssl
from pathlib import Path

from sapwood.errors import ConfigError

__all__ = ["client_context", "server_context"]


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """What a listener encrypts with.

    Raises:
        ConfigError: the files are no certificate and its key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"TLS: {certificate} and {key} cannot be used ({error}); they must be a certificate "
            "and its private key, in PEM"
        ) from error
    return context


def client_context(authority: Path) -> ssl.SSLContext:
    """What a client checks a server's certificate with.

    ``authority`` is the certificate that signed the server's, or a self-signed server's own. The
    name in the certificate must be the host that is connected to.

    Raises:
        ConfigError: the file is no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"TLS: {authority} cannot be used ({error}); it must be a certificate in PEM"
        ) from error
    return context
