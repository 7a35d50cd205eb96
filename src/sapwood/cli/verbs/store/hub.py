"""``sapwood store hub``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from sapwood.cli.verbs.store.place import At, opened
from sapwood.errors import ConfigError

__all__ = ["hub"]

_INSTALL = "sapwood store hub needs two more packages: pip install 'sapwood[web]'"


def hub(
    *,
    at: At = None,
    listen: str = "127.0.0.1:0",
    token_file: Annotated[Path | None, Parameter(name="--token-file")] = None,
    host: Annotated[tuple[str, ...], Parameter(negative="")] = (),
) -> None:
    """Give out the models to clients of the Hugging Face hub, until it is interrupted.

    With HF_ENDPOINT set to the address it prints, transformers, huggingface_hub and whatever uses
    them load models from the repository unchanged. A revision is a version or a tag; without one
    it is the latest version. Weights are made as safetensors while they are read; other files are
    those that came with the model (`sapwood store put FOLDER`). It only reads.

    ```
    sapwood store hub --listen 127.0.0.1:8090
    HF_ENDPOINT=http://127.0.0.1:8090 python train.py
    ```

    Args:
        at: The repository.
        listen: Where, as host:port; port 0 takes a free one. Other machines reach it only if the
            host says so, as 0.0.0.0 does.
        token_file: A file that holds a token, which clients then need in HF_TOKEN.
        host: Another name it is asked under, such as that of a proxy; may be given several times.
    """
    try:
        from sapwood.integrations.hub import HubServer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("anyio", "starlette", "uvicorn"):
            raise
        raise ConfigError(_INSTALL) from None
    from sapwood.runtime.tokens import read_token

    token = None if token_file is None else read_token(token_file)
    with opened(at) as repo:
        server = HubServer(repo, listen=listen, token=token, hosts=host)
        try:
            if token is None and not server.loopback:
                everybody = "everybody who reaches this address can read every model"
                print(f"sapwood: {everybody}; --token-file asks for a token", file=sys.stderr)
            print(f"HF_ENDPOINT={server.url}", flush=True)
            server.serve()
        finally:
            server.close()
