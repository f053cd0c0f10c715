"""A server in a moment: `python fake_server.py PORT [FIRST]`. It answers probes, and drains at the first signal.

With FIRST `fails` it ends at once with status 2; with `slow` a drain takes long. It prints a line at the start.
"""

from __future__ import annotations

import http.server
import os
import signal
import sys
import threading
import time


class Page(http.server.BaseHTTPRequestHandler):
    """Answers everything with the process's number."""

    def do_GET(self) -> None:
        body = str(os.getpid()).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


def main() -> None:
    port, kind = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    if kind == "fails":
        print("max_num_seqs: must be an integer", flush=True)
        sys.exit(2)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Page)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"listening on {port}", flush=True)
    ended.wait()
    time.sleep(60 if kind == "slow" else 0.1)
    print("drained", flush=True)


if __name__ == "__main__":
    main()
