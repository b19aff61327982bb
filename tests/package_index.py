"""A package index for the tests of fetching: an HTTP server on this machine, with the faults that real ones have."""

from __future__ import annotations

import http.server
import io
import threading
import time
import zipfile

WHEEL = "tiny_model-1.0-py3-none-any.whl"


class Index(http.server.ThreadingHTTPServer):
    """A package index with one wheel. `fault`: None, "forbidden", "truncated", or "stalled": half, then silence."""

    def __init__(self, wheel: bytes):
        super().__init__(("127.0.0.1", 0), Handler)
        self.wheel, self.fault, self.wheels_sent, self.half_sent = wheel, None, 0, threading.Event()
        self.address = f"http://127.0.0.1:{self.server_address[1]}/"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self.fault = None
        self.shutdown()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        index, is_wheel = self.server, self.path.endswith(".whl")
        body = index.wheel if is_wheel else f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
        self.send_response(403 if is_wheel and index.fault == "forbidden" else 200)
        self.send_header("Content-Type", "application/octet-stream" if is_wheel else "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        index.wheels_sent += is_wheel
        self.wfile.write(body[: len(body) // 2] if is_wheel and index.fault else body)
        while is_wheel and index.fault == "stalled":
            index.half_sent.set()
            time.sleep(0.02)

    def log_message(self, *args):
        pass


def make_wheel(content: dict[str, bytes]) -> bytes:
    """A wheel of the package tiny-model 1.0 with these files in its folder tiny_model."""
    about = {"METADATA": "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n", "RECORD": "",
             "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    with zipfile.ZipFile(data := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
        for folder, files in {"tiny_model": content, "tiny_model-1.0.dist-info": about}.items():
            for name, text in files.items():
                archive.writestr(f"{folder}/{name}", text)
    return data.getvalue()
