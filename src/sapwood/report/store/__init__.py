"""The web page of a model repository: what is there, what comes from what, and what changed.

``guards``      what a request must be to be heard: this machine, this page
``app``         which address answers what
``failures``    what is answered when something went wrong
``versions``    lists of versions and models: filtered, sorted, a page at a time
``detail``      one version and its tensors
``sharing``     how many versions share each tensor
``lineage``     the versions around one
``histogram``   how a tensor's elements are distributed
``comparison``  how two versions differ
``jobs``        long work, ended when nobody waits for it
``changes``     tags and removal, for who has the token
``serving``     the server, and who ends it

It needs ``pip install 'sapwood[web]'``. ``sapwood store ui`` starts it.
"""

from __future__ import annotations

from sapwood.report.store.serving import Serving

__all__ = ["Serving"]
