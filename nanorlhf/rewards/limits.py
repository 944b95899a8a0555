"""Limits on the total time and size of a request: hooks for an httpx2 client, whose timeout restarts with each byte."""

import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import httpx2


def limits(seconds: float, size: int, too_long: Callable[[str], Exception]) -> dict[str, list[Callable[[Any], None]]]:
    """Return `event_hooks` that abort a request after `seconds` in total, and an answer after `size` bytes.

    They need one connection per request, closed with it. too_long: creates the error from a message.
    """

    def limit_time(request: httpx2.Request) -> None:
        sockets: list[socket.socket] = []
        is_late = threading.Event()

        def stop() -> None:
            is_late.set()
            for each in sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)  # ends its read

        timer = threading.Timer(seconds, stop)
        timer.daemon = True
        timer.start()

        def trace(event: str, about: dict[str, Any]) -> None:
            if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
                sockets.append(about["return_value"].get_extra_info("socket"))
            elif event.endswith((".response_closed.complete", ".connect_tcp.failed", ".start_tls.failed")):
                timer.cancel()
            elif event.endswith(".failed") and is_late.is_set():
                raise httpx2.ReadTimeout("the answer never ends")

        request.extensions["trace"] = trace

    def limit_size(response: Any) -> None:
        body = bytearray()
        with closing(response.stream) as pieces:
            for piece in pieces:
                body += piece
                if len(body) > size:
                    raise too_long(f"an answer of more than {size:,} bytes")
        response.stream = httpx2.ByteStream(bytes(body))

    return {"request": [limit_time], "response": [limit_size]}
