"""The server that is asked, and its requests as bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from jaxserve.errors import ConfigError

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class Target:
    """Where requests go. `headers` are further ones, such as the key's."""

    host: str
    port: int
    path: str
    is_tls: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, base_url: str, endpoint: str, headers: Mapping[str, str] | None = None) -> Target:
        """Returns the target of `endpoint` under a URL like http://127.0.0.1:8000; ConfigError if it is none."""
        parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            message = f"must be like http://127.0.0.1:8000, got {base_url!r}"
            raise ConfigError(message, field="base_url", value=base_url)
        is_tls = parts.scheme == "https"
        path = f"{parts.path.rstrip('/')}/{endpoint.lstrip('/')}"
        return cls(parts.hostname, port or (443 if is_tls else 80), path, is_tls, headers or {})

    def encode(self, body: Mapping[str, Any]) -> bytes:
        """Returns the HTTP request that posts a JSON body."""
        content = json.dumps(body).encode()
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = {
            "host": f"{host}:{self.port}",
            "content-type": "application/json",
            "content-length": str(len(content)),
            "accept": "text/event-stream",
            **self.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"POST {self.path} HTTP/1.1\r\n{head}\r\n".encode() + content
