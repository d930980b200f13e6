"""A real nginx for tests: a reverse proxy on a free loopback port."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable

from tests.support.missing import missing
from tests.support.server import ServerProcess, free_port, wait_for

_MAIN = """daemon off;
worker_processes 1;
pid {folder}/pid;
error_log {folder}/log info;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{http}
}}
"""


class NginxServer(ServerProcess):
    """One nginx. ``http`` makes the content of its ``http`` block for the address that it should listen on."""

    def __init__(self, http: Callable[[str], str]) -> None:
        super().__init__("nginx")
        self._http = http
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> NginxServer:
        binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
        if binary is None:
            missing("needs nginx (apt-get install nginx-light)")
        config = self.folder / "nginx.conf"
        config.write_text(_MAIN.format(folder=self.folder, http=self._http(f"127.0.0.1:{self.port}")))
        self.launch([binary, "-p", self.folder, "-c", config])

        def listens() -> bool:
            assert self.process is not None and self.process.poll() is None, self.log
            with socket.create_connection(("127.0.0.1", self.port), 1):
                return True

        wait_for(listens, "nginx")
        return self
