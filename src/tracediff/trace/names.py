"""Names of nodes inside a segment, and texts in its string columns.

Zarr forbids some node names, and ZIP readers and file systems forbid more; module paths and batch
keys are whatever a user called them. Both escapes below are injective, so no two sites can end up
at one place, and the event columns keep the true names.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

import xxhash

from tracediff.events import Site

MAX_NAME: Final = 200
"""Longest node name in bytes: file systems stop at 255."""

_SAFE: Final = "#[]():=,+@ "
_RESERVED: Final = frozenset({"", ".", "..", "zarr.json"})
_ESCAPED: Final = re.compile(r"\\(\\|u[0-9a-f]{4})")


def node_name(name: str) -> str:
    """A name that is safe as one component of a Zarr key: plain ASCII, percent-encoded.

    Names that are too long end in their digest. `%` followed by no hex digit marks what percent
    encoding itself never writes.
    """
    if name in _RESERVED:
        return "%-" + name.replace(".", "-")
    encoded = quote(name.encode("utf-8", "surrogatepass"), safe=_SAFE)
    if encoded.startswith("__"):  # reserved by Zarr
        encoded = "%5F" + encoded[1:]
    if set(encoded) == {"."}:  # neither may a name consist of periods only
        encoded = encoded.replace(".", "%2E")
    if len(encoded) > MAX_NAME:
        suffix = "%~" + xxhash.xxh3_128_hexdigest(name.encode("utf-8", "surrogatepass"))
        encoded = encoded[: MAX_NAME - len(suffix)] + suffix
    return encoded


def payload_key(site: Site) -> str:
    """Where the payload of a site lies inside its segment."""
    return key_of(site.phase, site.path, site.call, site.port)


@lru_cache(maxsize=1 << 13)
def key_of(phase: str, path: str, call: int, port: str) -> str:
    """As `payload_key`, by the fields of the site."""
    top = phase if phase in ("rendering", "rng") else f"tensors/{node_name(phase)}"
    return f"{top}/{node_name(f'{path}#{call}')}/{node_name(port)}"


def payload_site(key: str, step: int) -> Site | None:
    """Undoes `payload_key`; None where the name was too long to be kept, or is no payload's."""
    parts = key.removeprefix("tensors/").split("/")
    if len(parts) != 3 or "%~" in key:
        return None
    phase, called, port = map(_plain_name, parts)
    path, _, call = called.rpartition("#")
    return Site(step, phase, path, int(call), port) if call.isdecimal() else None


def _plain_name(encoded: str) -> str:
    """Undoes `node_name`, and drops the order that tells apart events which share a site."""
    encoded = re.sub(r"%@\d+\Z", "", encoded)
    for name in _RESERVED:
        if encoded == node_name(name):
            return name
    return unquote(encoded, errors="surrogatepass")


def escape_text(text: str) -> str:
    """Makes a text valid UTF-8: lone surrogates become `\\udXXX`, backslashes are doubled."""
    if text.isascii() and "\\" not in text:
        return text
    return text.replace("\\", "\\\\").encode("utf-8", "backslashreplace").decode("utf-8")


def unescape_text(text: str) -> str:
    """Undoes `escape_text`."""
    if "\\" not in text:
        return text
    return _ESCAPED.sub(lambda m: "\\" if m[1] == "\\" else chr(int(m[1][1:], 16)), text)
