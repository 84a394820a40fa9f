"""Files of this host, read as those of another: by path or `file:///` address."""

from __future__ import annotations

import http.client
import io
import os
import stat
import urllib.parse
import urllib.request

SCHEME = "file:///"


class LocalFile(io.BufferedReader):
    """The bytes of a file from an offset on, read as from an HTTP response.

    Attributes:
        status: 206, for the bytes always begin at the offset asked for.

    Raises:
        OSError: it cannot be opened, or is no regular file: a pipe may never give a byte.
    """

    status = http.client.PARTIAL_CONTENT

    def __init__(self, source: str, offset: int) -> None:
        path = source
        if source.startswith(SCHEME):
            path = urllib.request.url2pathname(urllib.parse.urlsplit(source).path)
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
            raise OSError(f"{path}: not a regular file")
        super().__init__(io.FileIO(path))
        self.seek(offset)
