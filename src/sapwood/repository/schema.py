"""The tables of a repository's catalog.

A *blob* is a run of bytes that manifests refer to by its number. Its place is a pack and an
offset, or, once it was found to be equal to another one, that one's place: then ``same_as`` names
it, and it has no place of its own. So a manifest never changes, and equal tensors are merged after
the save has returned.

A model's number is unique over all catalogs of a repository and grows with time, so that the
latest version has the largest one. Its parent may be in another provider's catalog, which its name
tells.

A blob may lie in its pack in another form, as what differs from its ``base``; see ``cold``. Then
it takes ``stored`` bytes there. A base is never merged into another blob any more, as it has a
digest; so bases never lead in a circle.

``blob.refs`` counts the manifests that refer to a blob, and the blobs that are the same as it, or
have it as their base. ``pack.live`` counts the bytes that blobs take in it. ``pack.synced`` says
that it would survive a power cut, as every pack must that a version needs which was saved so.
"""

from __future__ import annotations

__all__ = ["MIGRATIONS", "SCHEMA", "SCHEMA_VERSION"]

SCHEMA_VERSION = 3

SCHEMA = """
CREATE TABLE setting (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE model (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    version TEXT NOT NULL,
    created REAL NOT NULL,
    removed REAL,
    parent INTEGER,
    parent_name TEXT,
    nbytes INTEGER NOT NULL,
    tensors INTEGER NOT NULL,
    manifest BLOB,
    note TEXT NOT NULL DEFAULT '{}',
    CHECK ((parent IS NULL) = (parent_name IS NULL))
);
CREATE UNIQUE INDEX model_by_name ON model (name, version) WHERE removed IS NULL;
CREATE INDEX model_by_parent ON model (parent);

CREATE TABLE tag (
    name TEXT NOT NULL,
    tag TEXT NOT NULL,
    model INTEGER NOT NULL REFERENCES model(id),
    PRIMARY KEY (name, tag)
) WITHOUT ROWID;
CREATE INDEX tag_by_model ON tag (model);

CREATE TABLE metric (
    model INTEGER NOT NULL REFERENCES model(id),
    key TEXT NOT NULL,
    value REAL NOT NULL,
    PRIMARY KEY (model, key)
) WITHOUT ROWID;
CREATE INDEX metric_by_value ON metric (key, value);

CREATE TABLE layer (
    id BLOB NOT NULL,
    model INTEGER NOT NULL REFERENCES model(id),
    nbytes INTEGER NOT NULL,
    PRIMARY KEY (id, model)
) WITHOUT ROWID;
CREATE INDEX layer_by_model ON layer (model);

CREATE TABLE config (digest BLOB PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;

CREATE TABLE pack (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL UNIQUE,
    nbytes INTEGER NOT NULL,
    live INTEGER NOT NULL,
    synced INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE blob (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    nbytes INTEGER NOT NULL,
    pack INTEGER REFERENCES pack(id),
    start INTEGER,
    refs INTEGER NOT NULL,
    digest BLOB,
    mark BLOB,
    same_as INTEGER REFERENCES blob(id),
    stored INTEGER,
    base INTEGER REFERENCES blob(id),
    CHECK ((same_as IS NULL) = (pack IS NOT NULL AND start IS NOT NULL))
);
CREATE INDEX blob_by_digest ON blob (digest, nbytes) WHERE same_as IS NULL AND digest IS NOT NULL;
CREATE INDEX blob_unhashed ON blob (id) WHERE digest IS NULL AND nbytes > 0;
CREATE INDEX blob_by_pack ON blob (pack);
CREATE INDEX blob_by_base ON blob (base) WHERE base IS NOT NULL;
"""

MIGRATIONS = {
    2: """
ALTER TABLE pack ADD COLUMN synced INTEGER NOT NULL DEFAULT 0;
ALTER TABLE blob ADD COLUMN stored INTEGER;
ALTER TABLE blob ADD COLUMN base INTEGER REFERENCES blob(id);
CREATE INDEX blob_by_base ON blob (base) WHERE base IS NOT NULL;
""",
}
"""By version: what makes its tables those of the next one."""
