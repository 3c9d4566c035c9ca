"""Folders of certificates as machines have them: one of the authority, one for each holder."""

from __future__ import annotations

import shutil
from pathlib import Path

from edgegossip.net.identity.certificates import Holder, authority_paths, holder_paths
from edgegossip.net.identity.revocation import list_path


def put(source: Path, target: Path) -> None:
    """Copy a file into the place of another as a whole."""
    part = target.with_name("part")
    shutil.copy(source, part)
    part.replace(target)


def give(authority: Path, folder: Path, rank: Holder) -> Path:
    """Copy to `folder` what belongs on the machine of worker `rank`, routers or observers."""
    folder.mkdir(exist_ok=True)
    certificate, key = holder_paths(authority, rank)
    # The key first, as the command does.
    for path in (authority_paths(authority)[0], key, certificate):
        put(path, folder / path.name)
    return folder


def tell_revoked(authority: Path, *folders: Path) -> None:
    """Copy the authority's list of revoked certificates to `folders`."""
    for folder in folders:
        put(list_path(authority), list_path(folder))
