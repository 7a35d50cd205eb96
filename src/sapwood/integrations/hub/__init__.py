"""A read endpoint like the Hugging Face hub's, so that its clients load models from a repository.

    with sapwood.store.open("models/") as repo, HubServer(repo) as server:
        print(f"HF_ENDPOINT={server.url}")

Needs ``pip install 'sapwood[web]'``.
"""

from __future__ import annotations

from sapwood.integrations.hub.app import hub_app
from sapwood.integrations.hub.server import HubServer

__all__ = ["HubServer", "hub_app"]
