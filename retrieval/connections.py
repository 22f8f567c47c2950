"""uvicorn's HTTP protocol with two bounds more: a deadline for the head of a request, and a limit of connections."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


def bounded_protocol(most_connections: int, head_seconds: float) -> type[H11Protocol]:
    """Returns the protocol class for `uvicorn.Config(http=…)`.

    Args:
      most_connections: further connections are closed at once.
      head_seconds: time for the whole head of a request, from the connection or from the end of the last reply;
        uvicorn's own limit ends with the first byte.
    """

    class BoundedProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            # Refused here and not with status 503: a client that never sends a request would never read it.
            if len(self.connections) > most_connections:
                transport.abort()
                return
            self._set_deadline()

        def _set_deadline(self) -> None:
            self._clear_deadline()
            self._unsent = self.transport.get_write_buffer_size()
            self._deadline = self.loop.call_later(head_seconds, self._expire)

        def _expire(self) -> None:
            # While the last reply is still being sent, and its client reads on, the time for a head has not begun.
            if 0 < self.transport.get_write_buffer_size() < self._unsent:
                self._set_deadline()
            else:
                self.transport.abort()

        def _clear_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def handle_events(self) -> None:
            super().handle_events()
            # From here on the application has deadlines of its own.
            if self.cycle is not None and not self.cycle.response_complete:
                self._clear_deadline()

        def on_response_complete(self) -> None:
            # Before the call, which may begin the next request of the connection.
            self._set_deadline()
            super().on_response_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._clear_deadline()
            super().connection_lost(exc)

    return BoundedProtocol
