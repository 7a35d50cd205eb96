"""``sapwood store serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

__all__ = ["serve"]


def serve(
    place: str,
    /,
    *,
    listen: str = "127.0.0.1:7070",
    name: str = "p0",
    advertise: str | None = None,
    token_file: Path | None = None,
    rights: Path | None = None,
    members: str | None = None,
    replicas: int = 1,
    placement: Literal["content", "model"] = "content",
    memory: str | None = None,
    staging: Literal["preallocated", "on_demand"] = "preallocated",
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> None:
    """Serve models to other processes and machines, until SIGTERM or Ctrl-C.

    Clients open `sapwood://host:port`, and prove that they know the token. Those on this machine
    are passed shared memory.

    ```
    sapwood store serve /data/models
    sapwood store serve memory: --memory 64GB
    sapwood store serve /data/models --listen 10.0.0.5:7070 --tls-cert c.pem --tls-key k.pem
    sapwood store serve /data/p0 --name p0 --members p0=10.0.0.5:7070,p1=10.0.0.6:7070
    ```

    Args:
        place: A folder, which is made if it is not there, or `memory:`.
        listen: Address and port; only this machine unless told otherwise; port 0 takes a free one.
        name: What it is called among several providers; it stays when the address changes.
        advertise: The host:port that others must dial, if that is not `--listen`.
        token_file: The token with every right, readable by its owner only; made if it is not there.
        rights: A TOML file with other tokens and what each may do.
        members: All providers of the repository, as p0=host:port,p1=host:port.
        replicas: At how many of them everything is kept.
        placement: `content` spreads each model's tensors by their bytes, so that models which
            share some meet; `model` keeps whole models, by name. All providers say the same.
        memory: How much `memory:` may take, such as 4GB; half of what is free if not said.
        staging: `on_demand` prepares no memory for the next save.
        tls_cert: A certificate, to encrypt what comes over the network.
        tls_key: Its private key.
    """
    import signal
    import threading

    from sapwood.repository.providers.serving import Served, ServeSettings, parse_size

    settings = ServeSettings(
        place=place,
        listen=listen,
        name=name,
        advertise=advertise,
        token_file=token_file,
        rights=rights,
        members=members,
        replicas=replicas,
        placement=placement,
        memory=None if memory is None else parse_size(memory),
        staging=staging,
        tls_cert=tls_cert,
        tls_key=tls_key,
    )
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    with Served(settings) as served:
        where = f"; its token is in {served.token_file}" if served.token_file else ""
        print(f"provider {name} serves {place} at {served.address}{where}", flush=True)
        asked.wait()
